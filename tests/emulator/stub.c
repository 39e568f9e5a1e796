// A CUDA runtime that launches nothing: it calls back with the arguments of each launch.
#include <stdint.h>
#include <stdio.h>

typedef struct { unsigned x, y, z; } dimensions;
typedef struct { int id; int padding; union { char bytes[64]; dimensions cluster; int flag; } value; } attribute;
typedef struct { dimensions grid, block; size_t shared; void *stream; attribute *attributes; unsigned count; } launch_config;
typedef void (*launched)(const char *name, const unsigned *numbers, void **arguments);

#ifndef MAJOR  // of the compute capability
#define MAJOR 9
#endif

enum { NAMES = 16, CLUSTER_DIMENSION = 4, STREAM_SERIALIZATION = 6, MAX_SHARED_PER_BLOCK = 97, COMPUTE_MAJOR = 75 };

static char names[NAMES][1024];
static int known = 0;
static launched callback = 0;

void stub_set_callback(launched function) { callback = function; }

int _cudaLibraryLoadData(void **library, const void *code, void *a, void *b, unsigned c, void *d, void *e, unsigned f) {
  *library = (void *)code;
  return 0;
}
int _cudaLibraryGetKernel(void **kernel, void *library, const char *name) {
  if (known == NAMES) return 1;
  snprintf(names[known], sizeof names[0], "%s", name);
  *kernel = names[known++];
  return 0;
}
int _cudaLaunchKernelEx(const launch_config *config, const void *kernel, void **arguments) {
  unsigned numbers[11] = {config->grid.x, config->grid.y, config->grid.z, config->block.x, config->block.y,
                          config->block.z, (unsigned)config->shared, 1, 1, 1, 0};
  for (unsigned i = 0; i < config->count; i++)
    if (config->attributes[i].id == CLUSTER_DIMENSION) {
      dimensions cluster = config->attributes[i].value.cluster;
      numbers[7] = cluster.x, numbers[8] = cluster.y, numbers[9] = cluster.z;
    } else if (config->attributes[i].id == STREAM_SERIALIZATION) {
      numbers[10] = config->attributes[i].value.flag;
    }
  callback((const char *)kernel, numbers, arguments);
  return 0;
}
int _cuKernelGetAttribute(int *value, int attribute, void *kernel, int device) { return *value = 0; }
int _cudaDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == MAX_SHARED_PER_BLOCK ? 232448 : attribute == COMPUTE_MAJOR ? MAJOR : 0;
  return 0;
}
int _cudaFuncSetAttribute(const void *function, int attribute, int value) { return 0; }
int _cudaKernelSetAttributeForDevice(void *kernel, int attribute, int value, int device) { return 0; }
int _cudaGetDevice(int *device) { return *device = 0; }
int _cudaSetDevice(int device) { return 0; }
int _cudaGetDeviceCount(int *count) { *count = 1; return 0; }
int _cudaLibraryUnload(void *library) { return 0; }
int cuda_dialect_init_library_once(void **library, int (*init)(void **), int (*load)(void **, int), void *raise) {
  if (*library) return 0;
  int failed = init(library);
  return failed ? failed : load(library, 0);
}
void cuda_dialect_unload_library_once(void **library, void *function) {}
int CuteDSLRT_TVMFFISetRaisedCudaLaunchError(int error) { return fprintf(stderr, "CUDA launch error %d\n", error), -1; }
int CuteDSLRT_TVMFFISetRaisedCudaError(int error) { return fprintf(stderr, "CUDA error %d\n", error), -1; }
