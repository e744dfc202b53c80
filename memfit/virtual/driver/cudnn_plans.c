/* Convolutions and attention: plans and their workspaces come from the real cuDNN.
 *
 * Since 9.8 cuDNN can plan for a device that is not there, described by a device-properties descriptor. PyTorch's
 * graphs are passed on with that descriptor in the place of the handle, and executing a plan does nothing. An older
 * cuDNN cannot: its plans are then invented, and need no workspace; memfit_vgpu_cudnn_plans() tells which it is.
 *
 * Engines that generate a kernel (attention) do so while their plan is finalized, which takes most of a second for each
 * shape. Nothing here would run that kernel, and the engine's configuration already knows the workspace, so such a plan
 * is finalized only when something else of it is asked for. MEMFIT_VGPU_COMPILE=1 always finalizes. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "vgpu.h"

typedef void *Descriptor;

enum { TYPE_INT64 = 3, TYPE_DESCRIPTOR = 15, TYPE_NOTE = 19, TYPE_INT32 = 23, TYPE_CHAR = 24 };
enum { ENGINE = 2, DEVICE_PROPERTIES = 38 };
enum { NOTE_COMPILES = 0, NOTES = 16 };
enum {
    HEURISTIC_GRAPH = 201, HEURISTIC_RESULTS = 202, HEURISTIC_DEVICE = 204,
    CONFIG_ENGINE = 300, CONFIG_WORKSPACE = 303, CONFIG_SHARED = 304,
    PLAN_HANDLE = 400, PLAN_CONFIG = 401, PLAN_WORKSPACE = 402, PLAN_DEVICE = 407,
    GRAPH_HANDLE = 800, GRAPH_ENGINES = 802,
    ENGINE_GRAPH = 1300, ENGINE_INDEX = 1301, ENGINE_NOTES = 1305, ENGINE_DEVICE = 1307,
    PROPERTIES_JSON = 2702,
};
enum { CUDNN_INTERNAL_ERROR = 4000, FIRST_WITH_DEVICES = 90800 };

static struct {
    int (*create)(int, Descriptor *);
    int (*destroy)(Descriptor);
    int (*set)(Descriptor, int, int, int64_t, const void *);
    int (*get)(Descriptor, int, int, int64_t, int64_t *, void *);
    int (*finalize)(Descriptor);
    size_t (*version)(void);
    size_t (*cudart)(void);
    int (*property)(int, int *);
    const char *(*error_string)(int);
    void (*last_error)(char *, size_t);
} real;

static bool usable;             /* the real library can plan for a described device */
static Descriptor device;       /* the description; one, since all devices are alike */
static pthread_once_t found_once = PTHREAD_ONCE_INIT, described_once = PTHREAD_ONCE_INIT;

/* The card in cuDNN's words. */
static void describe(char *text, size_t size) {
    const Card *c = card();
    snprintf(text, size,
             "{\"deviceVer\": %d, \"driverVer\": %d, \"maxGridSize\": [2147483647, 65535, 65535], "
             "\"maxBlockSize\": [1024, 1024, 64], \"regsPerBlock\": 65536, \"multiProcessorCount\": %d, "
             "\"smClockRateKHz\": %d, \"memClockRateKHz\": %d, \"l2CacheSize\": %d, \"warpSize\": 32, "
             "\"maxSharedMemoryPerBlock\": 49152, \"maxSharedMemoryPerBlockOptin\": %d, "
             "\"reservedSharedMemoryPerBlock\": %d, \"maxRegistersPerSM\": 65536, \"pciDeviceId\": 0, "
             "\"maxCtasPerSM\": %d, \"maxThreadsPerBlock\": 1024, \"maxThreadsPerSM\": %d, \"isTccDriver\": 0, "
             "\"supportCoopLaunch\": 1, \"totalGlobalMem\": %zu, \"cudaDeviceId\": 0, \"smCountOrigin\": 0, "
             "\"deviceName\": \"%s\"}",
             c->major * 100 + c->minor * 10, VGPU_CUDA_VERSION, c->sms, c->core_khz, c->memory_khz, c->l2,
             c->smem_block, c->major >= 8 ? 1024 : 0, c->blocks_sm, c->threads_sm, c->described, c->name);
}

static void resolve(void *library, const char *name, void *slot) {
    void *found = dlsym(library, name);
    *(void **)slot = found == own_symbol(name) ? NULL : found;
}

static void find_library(void) {
    void *library = dlopen("libcudnn.so.9", RTLD_LAZY | RTLD_NOLOAD);
    if (library == NULL) return;
    resolve(library, "cudnnBackendCreateDescriptor", &real.create);
    resolve(library, "cudnnBackendDestroyDescriptor", &real.destroy);
    resolve(library, "cudnnBackendSetAttribute", &real.set);
    resolve(library, "cudnnBackendGetAttribute", &real.get);
    resolve(library, "cudnnBackendFinalize", &real.finalize);
    resolve(library, "cudnnGetVersion", &real.version);
    resolve(library, "cudnnGetCudartVersion", &real.cudart);
    resolve(library, "cudnnGetProperty", &real.property);
    resolve(library, "cudnnGetErrorString", &real.error_string);
    resolve(library, "cudnnGetLastErrorString", &real.last_error);
}

/* The real library, without a look at the card: its version is asked for in a process that forks for other cards. */
static void find_real(void) { pthread_once(&found_once, find_library); }

static void describe_device(void) {
    find_real();
    bool complete = real.create && real.destroy && real.set && real.get && real.finalize && real.version;
    if (!complete || real.version() < FIRST_WITH_DEVICES) return;
    char text[1024];
    describe(text, sizeof text);
    usable = real.create(DEVICE_PROPERTIES, &device) == SUCCESS &&
             real.set(device, PROPERTIES_JSON, TYPE_CHAR, (int64_t)strlen(text), text) == SUCCESS &&
             real.finalize(device) == SUCCESS;
    if (!usable) fprintf(stderr, "memfit: cuDNN refuses the virtual card; convolution workspaces count as 0\n");
}

static bool asks_real(void) {
    pthread_once(&described_once, describe_device);
    return usable;
}

/* 1 when plans and workspaces are the real cuDNN's, 0 when they are invented. */
API int memfit_vgpu_cudnn_plans(void) { return asks_real(); }

/* Plans that are not finalized yet: with a configuration, and once that was asked, with its workspace. */
typedef struct Plan {
    struct Plan *next;
    Descriptor descriptor, config;
    int64_t workspace;
    bool deferred;
} Plan;

static Plan *plans;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static Plan **find(Descriptor descriptor) {
    Plan **at = &plans;
    while (*at != NULL && (*at)->descriptor != descriptor) at = &(*at)->next;
    return at;
}

static void remember(Descriptor descriptor, Descriptor config) {
    pthread_mutex_lock(&lock);
    Plan **at = find(descriptor);
    if (*at == NULL) *at = calloc(1, sizeof **at);
    if (*at != NULL) **at = (Plan){.descriptor = descriptor, .config = config, .next = (*at)->next};
    pthread_mutex_unlock(&lock);
}

static void forget(Descriptor descriptor) {
    pthread_mutex_lock(&lock);
    Plan **at = find(descriptor), *gone = *at;
    if (gone != NULL) *at = gone->next;
    free(gone);
    pthread_mutex_unlock(&lock);
}

static bool compiles(Descriptor config) {
    Descriptor engine;
    int notes[NOTES];
    int64_t count = 0;
    if (real.create(ENGINE, &engine) != SUCCESS) return false;
    bool found = real.get(config, CONFIG_ENGINE, TYPE_DESCRIPTOR, 1, &count, &engine) == SUCCESS &&
                 real.get(engine, ENGINE_NOTES, TYPE_NOTE, NOTES, &count, notes) == SUCCESS;
    real.destroy(engine);
    for (int64_t i = 0; found && i < count && i < NOTES; i++)
        if (notes[i] == NOTE_COMPILES) return true;
    return false;
}

/* Put the finalization of a plan off when all that it would add is a kernel. */
static bool defer(Descriptor descriptor) {
    const char *always = getenv("MEMFIT_VGPU_COMPILE");
    pthread_mutex_lock(&lock);
    Plan *plan = *find(descriptor);
    int64_t count = 0;
    if (plan != NULL && !(always != NULL && *always == '1'))
        plan->deferred = compiles(plan->config) && real.get(plan->config, CONFIG_WORKSPACE, TYPE_INT64, 1, &count,
                                                            &plan->workspace) == SUCCESS && count == 1;
    bool deferred = plan != NULL && plan->deferred;
    pthread_mutex_unlock(&lock);
    return deferred;
}

API int cudnnBackendCreateDescriptor(int kind, Descriptor *out) {
    if (asks_real()) return real.create(kind, out);
    *out = token();
    return SUCCESS;
}

API int cudnnBackendDestroyDescriptor(Descriptor descriptor) {
    if (!asks_real()) return SUCCESS;
    forget(descriptor);
    return real.destroy(descriptor);
}

static int set_device(Descriptor descriptor, int attribute) {
    return real.set(descriptor, attribute, TYPE_DESCRIPTOR, 1, &device);
}

API int cudnnBackendSetAttribute(Descriptor descriptor, int attribute, int type, int64_t count, const void *values) {
    if (!asks_real() || attribute == GRAPH_HANDLE) return SUCCESS;
    if (attribute == PLAN_HANDLE) return set_device(descriptor, PLAN_DEVICE);
    int status = real.set(descriptor, attribute, type, count, values);
    if (status == SUCCESS && attribute == PLAN_CONFIG) remember(descriptor, *(const Descriptor *)values);
    if (status != SUCCESS) return status;
    if (attribute == HEURISTIC_GRAPH) return set_device(descriptor, HEURISTIC_DEVICE);
    if (attribute == ENGINE_GRAPH) return set_device(descriptor, ENGINE_DEVICE);
    return SUCCESS;
}

API int cudnnBackendFinalize(Descriptor descriptor) {
    benchmark_arguments_made(descriptor);
    if (!asks_real() || defer(descriptor)) return SUCCESS;
    forget(descriptor);
    return real.finalize(descriptor);
}

/* The workspace of a plan that was put off; for anything else it is finalized now. */
static bool answer_deferred(Descriptor descriptor, int attribute, int64_t room, int64_t *count, void *values) {
    pthread_mutex_lock(&lock);
    Plan *plan = *find(descriptor);
    bool deferred = plan != NULL && plan->deferred;
    bool known = deferred && attribute == PLAN_WORKSPACE;
    if (known) {
        if (count != NULL) *count = 1;
        if (room > 0 && values != NULL) *(int64_t *)values = plan->workspace;
    }
    pthread_mutex_unlock(&lock);
    if (deferred && !known) {
        forget(descriptor);
        real.finalize(descriptor);
    }
    return known;
}

/* Without the real library: one engine, one configuration, no workspace, everything else absent. */
static int invent(int attribute, int type, int64_t room, int64_t *count, void *values) {
    bool one = attribute == HEURISTIC_RESULTS || attribute == PLAN_WORKSPACE || attribute == CONFIG_WORKSPACE ||
               attribute == CONFIG_SHARED || attribute == GRAPH_ENGINES || attribute == ENGINE_INDEX;
    int number = attribute == GRAPH_ENGINES;
    if (count != NULL) *count = one ? 1 : 0;
    if (one && room > 0 && values != NULL) {
        if (type == TYPE_INT64) *(int64_t *)values = number;
        if (type == TYPE_INT32) *(int32_t *)values = number;
    }
    return SUCCESS;
}

API int cudnnBackendGetAttribute(Descriptor descriptor, int attribute, int type, int64_t room, int64_t *count,
                                 void *values) {
    if (asks_real()) {
        if (answer_deferred(descriptor, attribute, room, count, values)) return SUCCESS;
        return real.get(descriptor, attribute, type, room, count, values);
    }
    return invent(attribute, type, room, count, values);
}

API int cudnnBackendExecute(UNUSED void *handle, Descriptor plan, Descriptor pack) {
    int64_t workspace = 0, count;
    values_kernel_ran(false);
    if (asks_real() && cudnnBackendGetAttribute(plan, PLAN_WORKSPACE, TYPE_INT64, 1, &count, &workspace) == SUCCESS)
        benchmark_executed(plan, pack, (size_t)workspace);
    return SUCCESS;
}

API size_t cudnnGetVersion(void) {
    find_real();
    return real.version ? real.version() : 90100;
}

API size_t cudnnGetCudartVersion(void) {
    find_real();
    return real.cudart ? real.cudart() : VGPU_CUDA_VERSION;
}

API int cudnnGetProperty(int kind, int *value) {
    find_real();
    if (real.property) return real.property(kind, value);
    *value = kind == 0 ? 9 : kind == 1 ? 1 : 0;
    return SUCCESS;
}

API const char *cudnnGetErrorString(int status) {
    find_real();
    if (real.error_string) return real.error_string(status);
    return status == SUCCESS ? "CUDNN_STATUS_SUCCESS" : "CUDNN_STATUS_INTERNAL_ERROR";
}

API void cudnnGetLastErrorString(char *text, size_t size) {
    find_real();
    if (real.last_error) real.last_error(text, size);
    else if (size > 0) text[0] = '\0';
}
