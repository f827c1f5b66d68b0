/* As much of the CUDA driver and runtime as torch_memory_saver asks for, over pages of files in memory, with a budget of bytes
   (STAND_IN_BUDGET). Built twice: with -DDRIVER as libcuda.so.1, else as libcudart.so.13. */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { OK = 0, INVALID = 1, NO_MEMORY = 2 };

#ifdef DRIVER

typedef struct { int file; size_t size; } Handle;
static size_t used;

size_t stand_in_budget(void) { const char *given = getenv("STAND_IN_BUDGET"); return given ? strtoull(given, 0, 10) : 1ull << 30; }
size_t stand_in_used(void) { return used; }

int cuCtxGetDevice(int *device) { *device = 0; return OK; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return OK; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { (void)attribute; (void)device; *value = 1; return OK; }
int cuGetErrorString(int error, const char **text) { *text = error == NO_MEMORY ? "out of memory" : "error"; return OK; }
int cuMemGetAllocationGranularity(size_t *size, const void *properties, int option) {
  (void)properties; (void)option; *size = 2 << 20; return OK;
}

int cuMemCreate(unsigned long long *out, size_t size, const void *properties, unsigned long long flags) {
  (void)properties; (void)flags;
  if (used + size > stand_in_budget()) return NO_MEMORY;
  Handle *handle = malloc(sizeof *handle);
  handle->file = memfd_create("device", 0);
  handle->size = size;
  if (handle->file < 0 || ftruncate(handle->file, size)) return INVALID;
  used += size;
  *out = (uintptr_t)handle;
  return OK;
}

int cuMemRelease(unsigned long long handle) {
  Handle *it = (Handle *)(uintptr_t)handle;
  used -= it->size;
  close(it->file);
  free(it);
  return OK;
}

int cuMemAddressReserve(unsigned long long *out, size_t size, size_t align, unsigned long long at, unsigned long long flags) {
  (void)align; (void)at; (void)flags;
  void *start = mmap(0, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  *out = (uintptr_t)start;
  return start == MAP_FAILED ? NO_MEMORY : OK;
}
int cuMemAddressFree(unsigned long long start, size_t size) { return munmap((void *)(uintptr_t)start, size) ? INVALID : OK; }

int cuMemMap(unsigned long long start, size_t size, size_t offset, unsigned long long handle, unsigned long long flags) {
  (void)flags;
  int file = ((Handle *)(uintptr_t)handle)->file;
  void *found = mmap((void *)(uintptr_t)start, size, PROT_NONE, MAP_SHARED | MAP_FIXED, file, offset);
  return found == MAP_FAILED ? INVALID : OK;
}
int cuMemSetAccess(unsigned long long start, size_t size, const void *access, size_t count) {
  (void)access; (void)count;
  return mprotect((void *)(uintptr_t)start, size, PROT_READ | PROT_WRITE) ? INVALID : OK;
}
int cuMemUnmap(unsigned long long start, size_t size) {
  void *found = mmap((void *)(uintptr_t)start, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
  return found == MAP_FAILED ? INVALID : OK;
}

#else

size_t stand_in_budget(void);
size_t stand_in_used(void);

int cudaMalloc(void **out, size_t size) { *out = malloc(size); return *out ? OK : NO_MEMORY; }
int cudaFree(void *start) { free(start); return OK; }
int cudaMallocHost(void **out, size_t size) { *out = malloc(size); return *out ? OK : NO_MEMORY; }
int cudaFreeHost(void *start) { free(start); return OK; }
int cudaMemcpy(void *to, const void *from, size_t size, int kind) { (void)kind; memcpy(to, from, size); return OK; }
int cudaGetDevice(int *device) { *device = 0; return OK; }
int cudaSetDevice(int device) { (void)device; return OK; }
int cudaDeviceSynchronize(void) { return OK; }
int cudaMemGetInfo(size_t *free, size_t *total) { *total = stand_in_budget(); *free = *total - stand_in_used(); return OK; }
const char *cudaGetErrorString(int error) { return error == NO_MEMORY ? "out of memory" : "error"; }

#endif
