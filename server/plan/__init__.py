"""What is played next: the order of tasks, how far generation may run ahead, and the groups that are open."""
