/* Files that the processes of one virtual machine share. */
#define _GNU_SOURCE
#include "machine.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "vgpu.h"

#define VARIABLE "MEMFIT_VGPU_MACHINE"

static char folder[512];
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void find_folder(void) {
    const char *named = getenv(VARIABLE);
    struct stat status;
    if (named == NULL || *named == '\0') return;
    if (*named != '/' || strlen(named) >= sizeof folder || stat(named, &status) != 0 || !S_ISDIR(status.st_mode)) {
        fprintf(stderr, "memfit: %s names no folder; this process has its virtual devices to itself\n", VARIABLE);
        return;
    }
    strcpy(folder, named);
}

bool machine_shared(void) {
    pthread_once(&once, find_folder);
    return folder[0] != '\0';
}

void *machine_map(const char *name, size_t bytes, int *file) {
    char path[sizeof folder + 128];
    if (!machine_shared()) return NULL;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    *file = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    void *mapped = MAP_FAILED;
    if (*file >= 0 && ftruncate(*file, (off_t)bytes) == 0)
        mapped = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, *file, 0);
    if (mapped == MAP_FAILED) {
        fprintf(stderr, "memfit: %s cannot be shared by the processes of a virtual machine: %s\n", path,
                strerror(errno));
        return NULL;
    }
    return mapped;
}

bool machine_room(int file, size_t offset, size_t bytes) {
    return posix_fallocate(file, (off_t)offset, (off_t)bytes) == 0;
}

static struct flock on_byte(size_t byte, short kind) {
    return (struct flock){.l_type = kind, .l_whence = SEEK_SET, .l_start = (off_t)byte, .l_len = 1};
}

bool machine_lock(int file, size_t byte, bool wait) {
    struct flock lock = on_byte(byte, F_WRLCK);
    int status;
    do status = fcntl(file, wait ? F_SETLKW : F_SETLK, &lock);
    while (status != 0 && wait && errno == EINTR);
    return status == 0;
}

void machine_unlock(int file, size_t byte) {
    struct flock lock = on_byte(byte, F_UNLCK);
    fcntl(file, F_SETLK, &lock);
}

bool machine_locked(int file, size_t byte) {
    struct flock lock = on_byte(byte, F_WRLCK);
    return fcntl(file, F_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}
