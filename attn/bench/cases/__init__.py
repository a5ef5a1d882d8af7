"""What is measured: layers, batches and their tensors."""
