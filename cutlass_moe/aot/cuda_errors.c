/* The two error helpers that compiled kernels call when CUDA refuses something. They raise a TVM-FFI RuntimeError, so that the
 * caller sees an ordinary Python exception. With them in the library nothing of the DSL's own runtime is needed.
 * The prototypes are those of CuteDSLRuntime.h, which the DSL ships. */

#include <stdint.h>
#include <stdio.h>

typedef void (*SetRaisedFn)(const char *kind, const char **parts, int32_t num_parts);

extern const char *cudaGetErrorName(int32_t code);
extern const char *cudaGetErrorString(int32_t code);

void CuteDSLRT_TVMFFISetRaisedCudaError(SetRaisedFn set_raised, int32_t code) {
  const char *parts[] = {"CUDA error ", cudaGetErrorName(code), ": ", cudaGetErrorString(code)};
  set_raised("RuntimeError", parts, 4);
}

void CuteDSLRT_TVMFFISetRaisedCudaLaunchError(
    SetRaisedFn set_raised, int32_t grid_x, int32_t grid_y, int32_t grid_z, int32_t block_x, int32_t block_y, int32_t block_z,
    int32_t block_threads, int64_t dynamic_smem, int32_t device, int32_t max_threads, int32_t max_block_x, int32_t max_block_y,
    int32_t max_block_z, int32_t max_grid_x, int32_t max_grid_y, int32_t max_grid_z, int32_t max_smem, int32_t max_smem_optin,
    const char *violation, const char *source_file, int32_t source_line, int32_t source_col, int32_t source_end_col) {
  (void)max_smem;
  (void)source_col;
  (void)source_end_col;
  char launch[256];
  char limits[256];
  char source[512];
  snprintf(launch, sizeof launch, "grid (%d, %d, %d), block (%d, %d, %d) = %d threads, %lld bytes of dynamic shared memory",
           grid_x, grid_y, grid_z, block_x, block_y, block_z, block_threads, (long long)dynamic_smem);
  snprintf(limits, sizeof limits, "device %d allows grid (%d, %d, %d), block (%d, %d, %d), %d threads, %d bytes", device,
           max_grid_x, max_grid_y, max_grid_z, max_block_x, max_block_y, max_block_z, max_threads, max_smem_optin);
  snprintf(source, sizeof source, "%s:%d", source_file ? source_file : "unknown source", source_line);
  const char *parts[] = {"CUDA cannot launch this kernel (", violation ? violation : "invalid launch", "): ", launch, "; ", limits,
                         "; launched at ", source};
  set_raised("RuntimeError", parts, 8);
}
