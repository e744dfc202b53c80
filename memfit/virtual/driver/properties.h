/* The runtime's device properties, as CUDA 12 and CUDA 13 lay them out. */
#ifndef MEMFIT_VGPU_PROPERTIES_H
#define MEMFIT_VGPU_PROPERTIES_H

#include <stddef.h>

#if VGPU_CUDA_MAJOR >= 13
#define ONLY_12(...)
#else
#define ONLY_12(...) __VA_ARGS__
#endif

typedef struct {
    char name[256];
    unsigned char uuid[16];
    char luid[8];
    unsigned luid_node_mask;
    size_t total_memory;
    size_t shared_per_block;
    int registers_per_block;
    int warp_size;
    size_t pitch;
    int threads_per_block;
    int block_dim[3];
    int grid_dim[3];
    ONLY_12(int clock_rate;)
    size_t constant_memory;
    int major, minor;
    size_t texture_alignment, texture_pitch_alignment;
    ONLY_12(int device_overlap;)
    int multiprocessors;
    ONLY_12(int execution_timeout;)
    int integrated;
    int maps_host_memory;
    ONLY_12(int compute_mode;)
    int texture_1d, texture_1d_mipmap;
    ONLY_12(int texture_1d_linear;)
    int texture_2d[2], texture_2d_mipmap[2], texture_2d_linear[3], texture_2d_gather[2];
    int texture_3d[3], texture_3d_alternate[3], texture_cubemap;
    int texture_1d_layered[2], texture_2d_layered[3], texture_cubemap_layered[2];
    int surface_1d, surface_2d[2], surface_3d[3], surface_1d_layered[2], surface_2d_layered[3];
    int surface_cubemap, surface_cubemap_layered[2];
    size_t surface_alignment;
    int concurrent_kernels;
    int ecc;
    int pci_bus, pci_device, pci_domain;
    int tcc;
    int copy_engines;
    int unified_addressing;
    ONLY_12(int memory_clock_rate;)
    int bus_bits;
    int l2_bytes, l2_persisting_bytes;
    int threads_per_sm;
    int stream_priorities;
    int global_l1, local_l1;
    size_t shared_per_sm;
    int registers_per_sm;
    int managed_memory;
    int multi_gpu_board, multi_gpu_group;
    int host_atomics;
    ONLY_12(int single_to_double;)
    int pageable_access, concurrent_managed;
    int preemption;
    int host_pointer_for_registered;
    int cooperative_launch;
    ONLY_12(int cooperative_multi_device;)
    size_t shared_per_block_optin;
    int pageable_host_tables, direct_managed;
    int blocks_per_sm;
    int access_window;
    size_t reserved_shared_per_block;
    int host_register, sparse_arrays, host_register_read_only, timeline_semaphores;
    int memory_pools;
    int gpudirect;
    unsigned gpudirect_flush;
    int gpudirect_ordering;
    unsigned pool_handle_types;
    int deferred_arrays, ipc_events;
    int cluster_launch;
    int unified_function_pointers;
    int reserved[63];
} Properties;

#endif
