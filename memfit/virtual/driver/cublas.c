/* cuBLAS and cuBLASLt: handles with state. Multiplications themselves are stubs; the workspaces that they use are
 * PyTorch's own, so their sizes need nothing from here. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "vgpu.h"

typedef struct {
    void *stream;
    int pointer_mode, math_mode, sm_target;
} Handle;

API int cublasCreate_v2(Handle **out) {
    *out = calloc(1, sizeof **out);
    return *out ? SUCCESS : NOT_INITIALIZED;
}

API int cublasDestroy_v2(Handle *handle) {
    free(handle);
    return SUCCESS;
}

API int cublasSetStream_v2(Handle *handle, void *stream) {
    handle->stream = stream;
    return SUCCESS;
}

API int cublasGetStream_v2(Handle *handle, void **stream) {
    *stream = handle->stream;
    return SUCCESS;
}

API int cublasSetPointerMode_v2(Handle *handle, int mode) {
    handle->pointer_mode = mode;
    return SUCCESS;
}

API int cublasGetPointerMode_v2(Handle *handle, int *mode) {
    *mode = handle->pointer_mode;
    return SUCCESS;
}

API int cublasSetMathMode(Handle *handle, int mode) {
    handle->math_mode = mode;
    return SUCCESS;
}

API int cublasGetMathMode(Handle *handle, int *mode) {
    *mode = handle->math_mode;
    return SUCCESS;
}

API int cublasSetSmCountTarget(Handle *handle, int target) {
    handle->sm_target = target;
    return SUCCESS;
}

API int cublasGetSmCountTarget(Handle *handle, int *target) {
    *target = handle->sm_target;
    return SUCCESS;
}

API int cublasLtCreate(Handle **out) { return cublasCreate_v2(out); }

API int cublasLtDestroy(Handle *handle) { return cublasDestroy_v2(handle); }

/* The version is the real library's, which PyTorch has loaded: features are switched by it. */
API size_t cublasLtGetVersion(void) {
    char file[32];
    snprintf(file, sizeof file, "libcublasLt.so.%d", VGPU_CUDA_MAJOR);
    void *real = dlopen(file, RTLD_LAZY | RTLD_NOLOAD);
    size_t (*version)(void) = NULL;
    if (real != NULL) *(void **)&version = dlsym(real, "cublasLtGetVersion");
    if (version != NULL && version != cublasLtGetVersion) return version();
    return (size_t)VGPU_CUDA_VERSION * 10;
}

static int give_token(void **out) {
    *out = token();
    return SUCCESS;
}

API int cublasLtMatmulDescCreate(void **out, UNUSED int compute, UNUSED int scale) { return give_token(out); }

API int cublasLtMatrixLayoutCreate(void **out, UNUSED int type, UNUSED uint64_t rows, UNUSED uint64_t columns,
                                   UNUSED int64_t stride) {
    return give_token(out);
}

API int cublasLtMatmulPreferenceCreate(void **out) { return give_token(out); }

typedef struct {
    uint64_t algorithm[8];
    size_t workspace;
    int status;
    float waves;
    int reserved[4];
} Heuristic;

/* One algorithm that needs no workspace. */
API int cublasLtMatmulAlgoGetHeuristic(UNUSED void *handle, UNUSED void *operation, UNUSED void *a, UNUSED void *b,
                                       UNUSED void *c, UNUSED void *d, UNUSED void *preference, int wanted,
                                       Heuristic *results, int *found) {
    for (int i = 0; i < wanted; i++) results[i] = (Heuristic){.waves = 1.0F};
    *found = wanted > 0 ? 1 : 0;
    return SUCCESS;
}
