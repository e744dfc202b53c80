/* What the files of the stand-in driver share.
 *
 * The library takes the place of NVIDIA's driver, CUDA runtime and math libraries in one process. Memory is
 * accounted for exactly; kernels are accepted and not executed. Everything declared here is written from the
 * documented interfaces; no header of NVIDIA is included. */
#ifndef MEMFIT_VGPU_H
#define MEMFIT_VGPU_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Marks what other libraries may call; everything else stays hidden inside this library. */
#define API __attribute__((visibility("default")))
#define UNUSED __attribute__((unused))

enum { MAX_DEVICES = 16 };
#define KIB ((size_t)1 << 10)
#define MIB ((size_t)1 << 20)
#define TIB ((size_t)1 << 40)

/* Device memory is handed out and charged in pages of this size, as on a card. */
#define PAGE (2 * MIB)

/* Copies and fills up to this size are really made, so that host code reads what it wrote; larger ones would
 * cost time and host memory for bytes that nobody computes. */
#define SMALL (64 * KIB)

/* Status codes; the runtime's and the driver's agree on these. */
enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    INVALID_FUNCTION = 98,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    NO_KERNEL_IMAGE = 209,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    HOST_REGISTERED = 712,
    NOT_REGISTERED = 713,
    CAPTURE_INVALID = 901,
};

/* The card, as the environment variable MEMFIT_VGPU_CARD describes it. */
typedef struct {
    char name[128];         /* NVIDIA's own name, which cuDNN's heuristics may read */
    char shown[160];        /* the name that CUDA and NVML report; it says that the card is virtual */
    int major, minor;       /* compute capability */
    int sms;                /* streaming multiprocessors */
    int smem_sm, smem_block; /* shared memory: per multiprocessor; most per block after opting in */
    int l2;                 /* bytes of level-2 cache */
    int threads_sm, blocks_sm; /* most threads and blocks resident on one multiprocessor */
    int bus_bits, memory_khz, core_khz; /* typical of the architecture; only heuristics read them */
    size_t total, context;  /* bytes: all of the memory, and the part that the context takes */
    size_t described;       /* the total of the description, which heuristics see whatever a trial may use */
    int devices;
} Card;

/* The card; its `devices` is 0 when the description was refused. Read once, on the first call. */
const Card *card(void);
/* Whether anything asked for the card yet; until then the environment may still describe another. */
bool card_was_read(void);
/* Changes the memory of each device; the caller has made sure that nothing was allocated. */
void card_set_total(size_t bytes);

/* The calling thread's device and last error, as the runtime keeps them. */
int current_device(void);
int set_current_device(int device);
int fail(int status);
int take_last_error(bool clear);

/* Device memory. Addresses are real, ascending from the lowest free gap, and have no storage until touched. */
int memory_allocate(int device, size_t bytes, void **out);
int memory_free(void *address);
int memory_reserve(size_t bytes, void **out);
int memory_unreserve(void *address);
/* Charges or gives back bytes without an address, for physical memory that is mapped later. */
int memory_charge(int device, size_t bytes);
void memory_discharge(int device, size_t bytes);
/* What is in use on a device, contexts and other processes included, now and at most; what this process holds of it
 * beside its context, now and at most. */
size_t memory_used(int device);
size_t memory_used_peak(int device);
size_t memory_held(int device);
size_t memory_held_peak(int device);
/* How much of the most that this process held was rounding up to whole pages. */
size_t memory_rounding(int device);
/* Makes this process's context count, as the first use of a device does; and what it counts now. */
void memory_open_context(int device);
size_t memory_context(int device);
bool memory_untouched(void);
/* False only for what is certainly no device address. */
bool memory_may_hold(uintptr_t address);
/* The device that owns [address, address + bytes), or -1 when any part of it is not live device memory. */
int memory_device(const void *address, size_t bytes);
/* Start and size of the allocation that holds the address; false when there is none. */
bool memory_range(const void *address, void **base, size_t *bytes);
/* Makes the pages read as zero again and gives their storage back to the host. */
void memory_wipe(void *address, size_t bytes);

/* Physical memory mapped into a reservation belongs to a device; the address alone does not say which. */
int mapped_device(const void *address);

/* Page-locked host memory. */
int host_allocate(size_t bytes, void **out);
int host_free(void *address);
int host_register(void *address, size_t bytes);
int host_unregister(void *address);
bool host_is_pinned(const void *address);

/* Which bytes of device memory hold a value that really is there. */
void values_write(const void *address, size_t bytes);
/* The same for a value worked out from others, which is no more certain than the least certain of them. */
void values_write_like(const void *address, size_t bytes, int certainty);
/* How many bytes from an address on, at most `bytes`, are known and were not there for a kernel to change: those of a
 * tensor that was made larger. */
size_t values_prefix(const void *address, size_t bytes);
void values_forget(const void *address, size_t bytes);
bool values_known(const void *address, size_t bytes);
/* Written and untouched since; written, but a kernel may have changed it since; never written. */
enum { VALUE_CERTAIN, VALUE_CHANGED, VALUE_UNKNOWN };
int values_certainty(const void *address, size_t bytes);
/* Forgets single numbers at addresses that a kernel was given. */
void values_touch(const uintptr_t *words, size_t count);
/* Notes a launch on this thread, and whether its kernel tells that something holds for all elements. */
void values_kernel_ran(bool affirms);
/* What an unknown flag reads as: whether the thread's last kernel affirms. */
bool values_affirmed(void);

/* A kernel that is really run where its inputs are small and known. */
typedef struct {
    unsigned char kind, type; /* kind is 0 for every other kernel */
} SmallKernel;
SmallKernel small_kernel(const char *name);
/* Runs it; false when its inputs are not known, and then its result is not either. `parts` is the grid's height. */
bool small_kernel_run(SmallKernel kernel, void **arguments, unsigned parts);

/* What was launched may have written to any address that it was given: those among the words of a kernel's
 * arguments, or in a list. */
void arguments_touched(const void *arguments, size_t words);
void arguments_listed(void *const *addresses, size_t count);

/* Copies what host code reads from device memory: what is there, or what stands in for it. */
void reads_answer(void *to, const void *from, size_t bytes);

int copy_bytes(void *to, const void *from, size_t bytes);
int fill_bytes(void *to, int value, size_t bytes);
int fill_words(void *to, uint32_t value, size_t words);

/* What cuDNN's benchmark mode tries: a plan with its arguments, and arguments that are new. */
void benchmark_executed(const void *plan, const void *with, size_t workspace);
void benchmark_arguments_made(const void *descriptor);

/* A new opaque handle: unique, never NULL, never read through. */
void *token(void);

/* Devices are numbered as this process sees them (CUDA_VISIBLE_DEVICES), but for NVML and for what processes share:
 * there each has the machine's own number. -1 is no device. */
int device_count(void);
int device_number(int device);
int device_with_number(int number);
int device_attribute(int attribute, int device, int *value);
void device_uuid(int number, unsigned char bytes[16]);
void device_uuid_text(int number, char *out, size_t size);

/* A function that this library itself exports, or NULL. */
void *own_symbol(const char *name);

/* Counts a call whose result had to be invented; `seen` is the caller's own flag. */
void note_unknown(const char *name, int *seen);

#endif
