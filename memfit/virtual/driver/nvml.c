/* NVML: what monitoring tools, `pynvml`, and PyTorch's out-of-memory message ask about the device.
 *
 * It sees every device of the machine, whatever CUDA_VISIBLE_DEVICES leaves to CUDA. The figures are the ones that
 * CUDA reports; the processes are those of the same virtual machine. */
#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "usage.h"
#include "vgpu.h"

/* NVML's own status codes. */
enum { NVML_INVALID_ARGUMENT = 2, NVML_NOT_SUPPORTED = 3, NVML_NOT_FOUND = 6, NVML_TOO_SMALL = 7, NVML_NO_DRIVER = 9 };

/* A handle is a device's number plus one. */
static int index_of(const void *handle) {
    int index = (int)(uintptr_t)handle - 1;
    return index >= 0 && index < card()->devices ? index : -1;
}

static int write_text(char *out, unsigned size, const char *text) {
    if (strlen(text) >= size) return NVML_TOO_SMALL;
    memcpy(out, text, strlen(text) + 1);
    return SUCCESS;
}

/* A bus per device, under a domain written with as many digits as the caller's field expects. */
static void bus_id(char *out, size_t size, const char *domain, int device) {
    snprintf(out, size, "%s:%02X:00.0", domain, (unsigned)(unsigned char)(device + 1));
}

API int nvmlInit_v2(void) { return card()->devices > 0 ? SUCCESS : NVML_NO_DRIVER; }

API int nvmlInit(void) { return nvmlInit_v2(); }

API int nvmlInitWithFlags(UNUSED unsigned flags) { return nvmlInit_v2(); }

API int nvmlShutdown(void) { return SUCCESS; }

API const char *nvmlErrorString(int status) {
    switch (status) {
    case SUCCESS: return "Success";
    case NVML_INVALID_ARGUMENT: return "Invalid Argument";
    case NVML_NOT_SUPPORTED: return "Not Supported";
    case NVML_NOT_FOUND: return "Not Found";
    case NVML_TOO_SMALL: return "Insufficient Size";
    case NVML_NO_DRIVER: return "Driver Not Loaded";
    default: return "Unknown Error";
    }
}

API int nvmlSystemGetDriverVersion(char *out, unsigned size) {
    return write_text(out, size, VGPU_CUDA_MAJOR >= 13 ? "580.0" : "570.0");
}

API int nvmlSystemGetNVMLVersion(char *out, unsigned size) {
    return write_text(out, size, VGPU_CUDA_MAJOR >= 13 ? "13.580.0" : "12.570.0");
}

API int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = VGPU_CUDA_VERSION;
    return SUCCESS;
}

API int nvmlSystemGetCudaDriverVersion(int *version) { return nvmlSystemGetCudaDriverVersion_v2(version); }

API int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = (unsigned)card()->devices;
    return SUCCESS;
}

API int nvmlDeviceGetCount(unsigned *count) { return nvmlDeviceGetCount_v2(count); }

API int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    if (index >= (unsigned)card()->devices) return NVML_INVALID_ARGUMENT;
    *handle = (void *)((uintptr_t)index + 1);
    return SUCCESS;
}

API int nvmlDeviceGetHandleByIndex(unsigned index, void **handle) {
    return nvmlDeviceGetHandleByIndex_v2(index, handle);
}

API int nvmlDeviceGetHandleByPciBusId_v2(const char *text, void **handle) {
    unsigned domain, bus;
    if (sscanf(text, "%x:%x:", &domain, &bus) != 2 || bus < 1) return NVML_INVALID_ARGUMENT;
    return nvmlDeviceGetHandleByIndex_v2(bus - 1, handle) ? NVML_NOT_FOUND : SUCCESS;
}

API int nvmlDeviceGetHandleByPciBusId(const char *text, void **handle) {
    return nvmlDeviceGetHandleByPciBusId_v2(text, handle);
}

API int nvmlDeviceGetHandleByUUID(const char *text, void **handle) {
    char own[48];
    for (int device = 0; device < card()->devices; device++) {
        device_uuid_text(device, own, sizeof own);
        if (strcmp(own, text) == 0) return nvmlDeviceGetHandleByIndex_v2((unsigned)device, handle);
    }
    return NVML_NOT_FOUND;
}

API int nvmlDeviceGetIndex(const void *handle, unsigned *index) {
    int device = index_of(handle);
    if (device < 0) return NVML_INVALID_ARGUMENT;
    *index = (unsigned)device;
    return SUCCESS;
}

API int nvmlDeviceGetMinorNumber(const void *handle, unsigned *number) { return nvmlDeviceGetIndex(handle, number); }

API int nvmlDeviceGetName(const void *handle, char *out, unsigned size) {
    return index_of(handle) < 0 ? NVML_INVALID_ARGUMENT : write_text(out, size, card()->shown);
}

API int nvmlDeviceGetUUID(const void *handle, char *out, unsigned size) {
    char text[48];
    int device = index_of(handle);
    if (device < 0) return NVML_INVALID_ARGUMENT;
    device_uuid_text(device, text, sizeof text);
    return write_text(out, size, text);
}

typedef struct {
    char legacy_bus_id[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
} PciInfo;

API int nvmlDeviceGetPciInfo_v3(const void *handle, PciInfo *out) {
    int device = index_of(handle);
    if (device < 0) return NVML_INVALID_ARGUMENT;
    *out = (PciInfo){.bus = (unsigned)device + 1};
    bus_id(out->bus_id, sizeof out->bus_id, "00000000", device);
    bus_id(out->legacy_bus_id, sizeof out->legacy_bus_id, "0000", device);
    return SUCCESS;
}

API int nvmlDeviceGetCudaComputeCapability(const void *handle, int *major, int *minor) {
    if (index_of(handle) < 0) return NVML_INVALID_ARGUMENT;
    *major = card()->major;
    *minor = card()->minor;
    return SUCCESS;
}

typedef struct {
    unsigned long long total, available, used;
} Memory;

/* The second version adds what the driver keeps for itself, on top of CUDA's total; here nothing. */
typedef struct {
    unsigned version;
    unsigned long long total, reserved, available, used;
} Memory2;

API int nvmlDeviceGetMemoryInfo(const void *handle, Memory *out) {
    int device = index_of(handle);
    if (device < 0) return NVML_INVALID_ARGUMENT;
    int seen = device_with_number(device);
    size_t total = card()->total, used = seen >= 0 ? memory_used(seen) : usage_others(device);
    *out = (Memory){total, used < total ? total - used : 0, used};
    return SUCCESS;
}

API int nvmlDeviceGetMemoryInfo_v2(const void *handle, Memory2 *out) {
    Memory first;
    int status = nvmlDeviceGetMemoryInfo(handle, &first);
    if (status == SUCCESS) *out = (Memory2){out->version, first.total, 0, first.available, first.used};
    return status;
}

typedef struct {
    unsigned pid;
    unsigned long long used;
} Process1;

typedef struct {
    unsigned pid;
    unsigned long long used;
    unsigned gpu_instance, compute_instance;
} Process;

/* This process, where it sees the device, and the others that hold some of it. */
static int find_processes(const void *handle, unsigned *count, Holder *out, size_t most) {
    int device = index_of(handle), seen = device_with_number(device);
    if (device < 0) return NVML_INVALID_ARGUMENT;
    size_t held = seen >= 0 ? memory_context(seen) + memory_held(seen) : 0;
    size_t own = held > 0, room = *count < most ? *count : most;
    if (own && room > 0) out[0] = (Holder){(unsigned)getpid(), held};
    size_t found = own + usage_holders(device, room > own ? out + own : NULL, room > own ? room - own : 0);
    *count = (unsigned)found;
    return found > room ? NVML_TOO_SMALL : SUCCESS;
}

enum { MOST_PROCESSES = 257 };

API int nvmlDeviceGetComputeRunningProcesses(const void *handle, unsigned *count, Process1 *out) {
    Holder found[MOST_PROCESSES];
    int status = find_processes(handle, count, found, MOST_PROCESSES);
    for (unsigned i = 0; status == SUCCESS && i < *count; i++) out[i] = (Process1){found[i].pid, found[i].bytes};
    return status;
}

API int nvmlDeviceGetComputeRunningProcesses_v2(const void *handle, unsigned *count, Process *out) {
    Holder found[MOST_PROCESSES];
    int status = find_processes(handle, count, found, MOST_PROCESSES);
    for (unsigned i = 0; status == SUCCESS && i < *count; i++)
        out[i] = (Process){found[i].pid, found[i].bytes, ~0U, ~0U};
    return status;
}

API int nvmlDeviceGetComputeRunningProcesses_v3(const void *handle, unsigned *count, Process *out) {
    return nvmlDeviceGetComputeRunningProcesses_v2(handle, count, out);
}

API int nvmlDeviceGetGraphicsRunningProcesses_v3(const void *handle, unsigned *count, UNUSED Process *out) {
    *count = 0;
    return index_of(handle) < 0 ? NVML_INVALID_ARGUMENT : SUCCESS;
}

API int nvmlDeviceGetUtilizationRates(const void *handle, unsigned out[2]) {
    out[0] = out[1] = 0;
    return index_of(handle) < 0 ? NVML_INVALID_ARGUMENT : SUCCESS;
}

API int nvmlDeviceGetComputeMode(const void *handle, int *mode) {
    *mode = 0;
    return index_of(handle) < 0 ? NVML_INVALID_ARGUMENT : SUCCESS;
}

API int nvmlDeviceGetP2PStatus(const void *handle, UNUSED const void *peer, UNUSED int kind, int *status) {
    *status = 0;
    return index_of(handle) < 0 ? NVML_INVALID_ARGUMENT : SUCCESS;
}

/* There is no NVLink, and nothing that a sensor could read. */
API int nvmlDeviceGetNvLinkState(UNUSED const void *handle, UNUSED unsigned link, UNUSED int *active) {
    return NVML_NOT_SUPPORTED;
}

API int nvmlDeviceGetNvLinkRemoteDeviceType(UNUSED const void *handle, UNUSED unsigned link, UNUSED int *kind) {
    return NVML_NOT_SUPPORTED;
}

API int nvmlDeviceGetNvLinkRemotePciInfo_v2(UNUSED const void *handle, UNUSED unsigned link, UNUSED void *info) {
    return NVML_NOT_SUPPORTED;
}

/* The state of a card without a fabric is 0, like everything else in the answer. Its first word is the version that
 * the caller wants, which holds the size. */
API int nvmlDeviceGetGpuFabricInfoV(const void *handle, unsigned *info) {
    size_t bytes = *info & 0xffffff;
    if (index_of(handle) < 0 || bytes < sizeof *info || bytes > KIB) return NVML_INVALID_ARGUMENT;
    memset(info + 1, 0, bytes - sizeof *info);
    return SUCCESS;
}

API int nvmlDeviceGetTemperature(UNUSED const void *handle, UNUSED int sensor, UNUSED unsigned *value) {
    return NVML_NOT_SUPPORTED;
}

API int nvmlDeviceGetPowerUsage(UNUSED const void *handle, UNUSED unsigned *value) { return NVML_NOT_SUPPORTED; }

API int nvmlDeviceGetClockInfo(UNUSED const void *handle, UNUSED int kind, UNUSED unsigned *value) {
    return NVML_NOT_SUPPORTED;
}

API int nvmlDeviceGetFanSpeed(UNUSED const void *handle, UNUSED unsigned *value) { return NVML_NOT_SUPPORTED; }
