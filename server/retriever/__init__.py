"""The retriever's listener: any retriever of ours behind `/retrieve`, in search-r1's form."""
