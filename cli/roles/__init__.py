"""The processes that a run consists of: each module has one `main(context)`."""
