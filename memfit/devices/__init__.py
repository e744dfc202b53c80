"""What a device is and how its memory is read: CUDA's allocator, NVML, the host."""
