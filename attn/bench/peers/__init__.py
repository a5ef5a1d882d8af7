"""What is measured beside ours: kernels of other projects."""
