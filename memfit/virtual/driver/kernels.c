/* Kernels: which were registered, what is known about them, and their launch without effect.
 *
 * Libraries register each kernel with the binary that holds it, compiled for several architectures. Which of them
 * a card would run is told as on a card: CUB chooses its code by it, and a card that a library was not compiled
 * for fails with "no kernel image". Which few kernels are really run is told in small_kernels.c. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "vgpu.h"

typedef struct {
    const unsigned char *binary; /* several images, each for one architecture */
    int binary_version, ptx_version; /* of the image that the card runs; 0 when not yet looked for, -1 for none */
} Module;

typedef struct {
    const void *function; /* address of the host's stub, by which a launch names its kernel */
    Module *module;
    SmallKernel small;
    unsigned short words; /* of its arguments that may be addresses which it writes to; see below */
    bool affirms;       /* it tells whether something holds for all elements */
} Kernel;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Kernel *kernels; /* sorted by function when `sorted` */
static size_t count, capacity;
static bool sorted;

/* The wrapper that a library passes to its registration. */
typedef struct {
    int magic, version;
    const unsigned char *binary;
    void *more;
} Wrapper;

enum { WRAPPER_MAGIC = 0x466243b1 };
#define BINARY_MAGIC 0xba55ed50U

API void **__cudaRegisterFatBinary(const void *image) {
    const Wrapper *wrapper = image;
    Module *module = calloc(1, sizeof *module);
    if (module != NULL && wrapper != NULL && wrapper->magic == WRAPPER_MAGIC) module->binary = wrapper->binary;
    return (void **)module;
}

API void __cudaRegisterFatBinaryEnd(UNUSED void **handle) {}

/* The module stays: kernels of an unloaded library are never launched again. */
API void __cudaUnregisterFatBinary(UNUSED void **handle) {}

API char __cudaInitModule(UNUSED void **handle) { return 1; }

API void __cudaRegisterVar(UNUSED void **handle, UNUSED char *host, UNUSED char *address, UNUSED const char *name,
                           UNUSED int external, UNUSED size_t bytes, UNUSED int constant, UNUSED int global) {}

/* Whether a kernel reduces flags by "and", or joins the two halves of "is finite". Host code asks such a question to
 * make sure that all is well; that is the answer it is given. Any other flag reads as false. */
static bool affirms(const char *name) {
    return name != NULL && (strstr(name, "15and_kernel_cuda") != NULL || strstr(name, "10MulFunctorIbE") != NULL);
}

/* PyTorch's elementwise kernels write to the first address of their third argument alone, or else never to a single
 * number, and neither do those that are given lists of tensors, and those that pick what is not zero write the number
 * of it once more. Reductions have one large argument, other kernels a few small ones. */
enum { THIRD_ARGUMENT = 1, USUAL_WORDS = 64, REDUCTION_WORDS = 144 };

static unsigned short argument_words(const char *name) {
    if (name == NULL) return USUAL_WORDS;
    if (strstr(name, "29vectorized_elementwise_kernel") || strstr(name, "27unrolled_elementwise_kernel"))
        return THIRD_ARGUMENT;
    if (strstr(name, "18elementwise_kernelI") || strstr(name, "25multi_tensor_apply_kernel") ||
        strstr(name, "9NonZeroOpI"))
        return 0;
    return strstr(name, "13reduce_kernelI") ? REDUCTION_WORDS : USUAL_WORDS;
}

API void __cudaRegisterFunction(void **handle, const char *function, UNUSED char *device_function, const char *name,
                                UNUSED int threads, UNUSED void *thread, UNUSED void *block, UNUSED void *block_size,
                                UNUSED void *grid_size, UNUSED int *warps) {
    pthread_mutex_lock(&lock);
    if (count == capacity) {
        size_t larger = capacity ? 2 * capacity : 1 << 15;
        Kernel *moved = realloc(kernels, larger * sizeof *moved);
        if (moved != NULL) {
            kernels = moved;
            capacity = larger;
        }
    }
    if (count < capacity) kernels[count++] = (Kernel){function, (Module *)handle, small_kernel(name), argument_words(name), affirms(name)};
    sorted = false;
    pthread_mutex_unlock(&lock);
}

static int by_function(const void *a, const void *b) {
    uintptr_t first = (uintptr_t)((const Kernel *)a)->function, second = (uintptr_t)((const Kernel *)b)->function;
    return (first > second) - (first < second);
}

/* What a card would run of a library's images: compiled code of its own generation and no newer than the card, the
 * nearest; else code that the driver compiles, of any older generation. */
static void choose_image(Module *module) {
    enum { PTX = 1, COMPILED = 2 };
    const unsigned char *at = module->binary;
    int card_version = card()->major * 10 + card()->minor, compiled = 0, ptx = 0;
    uint32_t magic;
    uint16_t header;
    uint64_t bytes;
    module->binary_version = module->ptx_version = card_version; /* when there is nothing to read */
    if (at == NULL) return;
    memcpy(&magic, at, sizeof magic);
    if (magic != BINARY_MAGIC) return;
    memcpy(&header, at + 6, sizeof header);
    memcpy(&bytes, at + 8, sizeof bytes);
    const unsigned char *end = at + header + bytes;
    for (at += header; at + 32 <= end;) {
        uint16_t kind;
        uint32_t size, version;
        uint64_t payload;
        memcpy(&kind, at, sizeof kind);
        memcpy(&size, at + 4, sizeof size);
        memcpy(&payload, at + 8, sizeof payload);
        memcpy(&version, at + 28, sizeof version);
        int v = (int)version;
        if (kind == COMPILED && v / 10 == card_version / 10 && v <= card_version && v > compiled) compiled = v;
        if (kind == PTX && v <= card_version && v > ptx) ptx = v;
        if (size == 0 || payload > (uint64_t)(end - at)) break;
        at += size + payload;
    }
    if (compiled > 0) module->binary_version = module->ptx_version = compiled;
    else if (ptx > 0) module->ptx_version = ptx;
    else module->binary_version = module->ptx_version = -1;
}

/* The kernel of a host stub, with its image chosen; all zero for one that was never registered. */
static Kernel lookup(const void *function) {
    Kernel wanted = {.function = function}, found = {0};
    pthread_mutex_lock(&lock);
    if (!sorted && count > 0) {
        qsort(kernels, count, sizeof *kernels, by_function);
        sorted = true;
    }
    const Kernel *at = count ? bsearch(&wanted, kernels, count, sizeof *kernels, by_function) : NULL;
    if (at != NULL) {
        found = *at;
        if (found.module != NULL && found.module->binary_version == 0) choose_image(found.module);
    }
    pthread_mutex_unlock(&lock);
    return found;
}

static bool runs_here(const Kernel *kernel) { return kernel->module == NULL || kernel->module->binary_version >= 0; }

typedef struct {
    unsigned x, y, z;
} Dim3;

static int launch(const void *function, Dim3 grid, void **arguments) {
    Kernel kernel = lookup(function);
    if (!runs_here(&kernel)) return fail(NO_KERNEL_IMAGE);
    bool ran = kernel.small.kind != 0 && arguments != NULL && small_kernel_run(kernel.small, arguments, grid.y);
    if (ran) return SUCCESS;
    if (kernel.words == THIRD_ARGUMENT && arguments != NULL) {
        uintptr_t out;
        memcpy(&out, arguments[2], sizeof out);
        values_touch(&out, 1);
    } else if (arguments != NULL && kernel.words > 0) {
        arguments_touched(kernel.words == REDUCTION_WORDS ? arguments[0] : arguments, kernel.words);
    }
    values_kernel_ran(kernel.affirms);
    return SUCCESS;
}

/* The configuration between a launch's two halves: `kernel<<<grid, block, shared, stream>>>` pushes and pops it. */
static __thread struct {
    Dim3 grid, block;
    size_t shared;
    void *stream;
} pending;

API unsigned __cudaPushCallConfiguration(Dim3 grid, Dim3 block, size_t shared, void *stream) {
    pending.grid = grid;
    pending.block = block;
    pending.shared = shared;
    pending.stream = stream;
    return 0;
}

API int __cudaPopCallConfiguration(Dim3 *grid, Dim3 *block, size_t *shared, void **stream) {
    *grid = pending.grid;
    *block = pending.block;
    *shared = pending.shared;
    *stream = pending.stream;
    return SUCCESS;
}

/* A kernel's handle is its host stub. */
API int __cudaGetKernel(const void **kernel, const void *function) {
    *kernel = function;
    return SUCCESS;
}

API int cudaGetKernel(const void **kernel, const void *function) { return __cudaGetKernel(kernel, function); }

API int __cudaLaunchKernel(const void *kernel, Dim3 grid, UNUSED Dim3 block, void **arguments,
                           UNUSED size_t shared, UNUSED void *stream) {
    return launch(kernel, grid, arguments);
}

API int cudaLaunchKernel(const void *function, Dim3 grid, UNUSED Dim3 block, void **arguments,
                         UNUSED size_t shared, UNUSED void *stream) {
    return launch(function, grid, arguments);
}

API int cudaLaunchCooperativeKernel(const void *function, Dim3 grid, UNUSED Dim3 block, void **arguments,
                                    UNUSED size_t shared, UNUSED void *stream) {
    return launch(function, grid, arguments);
}

/* A configuration begins with the grid. */
API int cudaLaunchKernelExC(const void *configuration, const void *function, void **arguments) {
    Dim3 grid;
    memcpy(&grid, configuration, sizeof grid);
    return launch(function, grid, arguments);
}

API int cuLaunchKernel(UNUSED void *function, UNUSED unsigned grid_x, UNUSED unsigned grid_y, UNUSED unsigned grid_z,
                       UNUSED unsigned block_x, UNUSED unsigned block_y, UNUSED unsigned block_z,
                       UNUSED unsigned shared, UNUSED void *stream, void **arguments, UNUSED void **extra) {
    if (arguments != NULL) arguments_touched(arguments, USUAL_WORDS);
    values_kernel_ran(false);
    return SUCCESS;
}

API int cuLaunchKernelEx(UNUSED const void *configuration, UNUSED void *function, void **arguments,
                         UNUSED void **extra) {
    if (arguments != NULL) arguments_touched(arguments, USUAL_WORDS);
    values_kernel_ran(false);
    return SUCCESS;
}

typedef struct {
    size_t shared, constant, local;
    int threads_per_block, registers, ptx_version, binary_version, cache_mode, dynamic_shared, carveout;
    int clusters[6], reserved[16];
} FunctionAttributes;

API int cudaFuncGetAttributes(FunctionAttributes *out, const void *function) {
    Kernel kernel = lookup(function);
    if (!runs_here(&kernel)) return fail(NO_KERNEL_IMAGE);
    int version = card()->major * 10 + card()->minor;
    *out = (FunctionAttributes){
        .threads_per_block = 1024, .registers = 32, .dynamic_shared = 48 << 10, .carveout = -1,
        .ptx_version = kernel.module ? kernel.module->ptx_version : version,
        .binary_version = kernel.module ? kernel.module->binary_version : version,
    };
    return SUCCESS;
}

API int cuFuncGetAttribute(int *value, int attribute, UNUSED void *function) {
    enum { THREADS_PER_BLOCK = 0, REGISTERS = 4, PTX_VERSION, BINARY_VERSION, DYNAMIC_SHARED = 8, CARVEOUT };
    switch (attribute) {
    case THREADS_PER_BLOCK: *value = 1024; break;
    case REGISTERS: *value = 32; break;
    case PTX_VERSION: case BINARY_VERSION: *value = card()->major * 10 + card()->minor; break;
    case DYNAMIC_SHARED: *value = 48 << 10; break;
    case CARVEOUT: *value = -1; break;
    default: *value = 0;
    }
    return SUCCESS;
}

API int cuKernelGetAttribute(int *value, int attribute, void *kernel, UNUSED int device) {
    return cuFuncGetAttribute(value, attribute, kernel);
}

/* Blocks that fit a multiprocessor at once. True register counts are unknown; 32 a thread is typical. */
static int occupancy(int threads, size_t shared_bytes, int *blocks) {
    const Card *c = card();
    if (threads < 1 || threads > 1024 || shared_bytes > (size_t)c->smem_sm) return INVALID_VALUE;
    int warps = (threads + 31) / 32;
    int most = c->threads_sm / 32 / warps;
    int by_registers = 65536 / (32 * 32 * warps);
    if (by_registers < most) most = by_registers;
    if (c->blocks_sm < most) most = c->blocks_sm;
    if (shared_bytes > 0) {
        int by_shared = c->smem_sm / (int)(shared_bytes + (c->major >= 8 ? 1024 : 0));
        if (by_shared < most) most = by_shared;
    }
    *blocks = most > 0 ? most : 1;
    return SUCCESS;
}

API int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, UNUSED const void *function, int threads,
                                                      size_t shared) {
    int status = occupancy(threads, shared, blocks);
    return status ? fail(status) : SUCCESS;
}

API int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int threads,
                                                               size_t shared, UNUSED unsigned flags) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, shared);
}

API int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, UNUSED void *function, int threads, size_t shared) {
    return occupancy(threads, shared, blocks);
}

API int cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, UNUSED void *function, int threads,
                                                             size_t shared, UNUSED unsigned flags) {
    return occupancy(threads, shared, blocks);
}

API int cuOccupancyMaxActiveClusters(int *clusters, UNUSED void *function, UNUSED const void *config) {
    *clusters = 16;
    return SUCCESS;
}

API int cudaOccupancyMaxActiveClusters(int *clusters, UNUSED const void *function, UNUSED const void *config) {
    *clusters = 16;
    return SUCCESS;
}
