"""The embedded backend: shared memory, process_vm and sockets of this host, and CUDA IPC between its GPUs."""
