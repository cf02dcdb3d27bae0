/* Launches the kernels of a layer in order. From Python each launch would cost the host 4 us, and each buffer that two kernels
 * share an allocation; here all of them are one call and one workspace. cutlass_moe/layer.py calls it with checked tensors.
 * Views of the tensors live on this function's stack: a kernel's launcher reads them and keeps nothing. */

#include <stdint.h>

#include <tvm/ffi/c_api.h>

/* The arguments. Tensors as torch gives them; biases None where there are none. Kernels are functions of any library; PERMUTE is
 * None where the GATE_GEMM gathers its rows itself; COUNTS_IDS says whether it then counts the ids of each expert itself, too.
 * OFFSETS is the shape object of the buffers' places. */
enum {
  X_TH, IDS_TK, WEIGHTS_TK, W_GATE_EIH, W_UP_EIH, W_DOWN_EHI, B_GATE_EI, B_UP_EI, B_DOWN_EH, OUT_TH, WORKSPACE,
  ROUTE, PERMUTE, GATE_GEMM, DOWN_GEMM, COMBINE, OFFSETS, CHUNKS, COUNTS_IDS, SM_COUNT, NUM_ARGS
};

/* The buffers in the workspace, in the order of `workspace.layout`. */
enum { EXPERT_OFFSETS_E1, ROW_SLOT_M, ROW_TOKEN_M, SLOT_ROW_TK, ROW_WEIGHT_M, CHUNK_COUNTS_CE, TILE_COUNTERS_2, ROWS_MH, H_MI };

typedef struct {
  DLTensor tensor;
  int64_t shape[3];
  int64_t strides[3];
} View;

/* An ffi Array of up to two tensors. Kernels take their epilogue's tensors so. */
typedef struct {
  uint64_t allocator[2]; /* TVM-FFI looks here, before an object, for what its allocator put there: nothing */
  TVMFFIObject object;
  TVMFFISeqCell sequence;
  TVMFFIAny items[2];
} Pair;

static const DLDataType INT32 = {kDLInt, 32, 1};
static const DLDataType FLOAT32 = {kDLFloat, 32, 1};
static const TVMFFIAny NONE = {.type_index = kTVMFFINone};

static const DLTensor *tensor_of(const TVMFFIAny *argument) { return (const DLTensor *)(argument->v_obj + 1); }

static TVMFFIAny boolean(int value) { return (TVMFFIAny){.type_index = kTVMFFIBool, .v_int64 = value}; }

static TVMFFIAny viewed(View *view) { return (TVMFFIAny){.type_index = kTVMFFIDLTensorPtr, .v_ptr = &view->tensor}; }

/* The argument's tensor, each size-1 dimension given the stride that it has in a contiguous tensor. The stride of such a dimension
 * means nothing, yet DLPack export replaces an unusual one by 1, and the kernels need multiples of 16 bytes. */
static TVMFFIAny canonical(const TVMFFIAny *argument, View *view) {
  if (argument->type_index == kTVMFFINone) return NONE;
  view->tensor = *tensor_of(argument);
  int64_t span = 1;
  for (int32_t dim = view->tensor.ndim - 1; dim >= 0; --dim) {
    view->strides[dim] = view->tensor.shape[dim] == 1 ? span : view->tensor.strides[dim];
    span *= view->tensor.shape[dim];
  }
  view->tensor.strides = view->strides;
  return viewed(view);
}

/* A contiguous matrix, or with ndim 1 a vector of its rows, at a place in the workspace. */
static TVMFFIAny carved(const DLTensor *workspace, int64_t offset, DLDataType dtype, int32_t ndim, int64_t rows, int64_t columns,
                        View *view) {
  view->tensor = *workspace;
  view->tensor.data = (char *)workspace->data + offset;
  view->tensor.dtype = dtype;
  view->tensor.ndim = ndim;
  view->tensor.shape = view->shape;
  view->tensor.strides = view->strides;
  view->shape[0] = rows;
  view->shape[1] = columns;
  view->strides[0] = ndim == 2 ? columns : 1;
  view->strides[1] = 1;
  return viewed(view);
}

/* The int32 words of ids, [T, K, 1 or 2], or without COUNTED [0, K, 1 or 2]. */
static TVMFFIAny words_of(const DLTensor *ids, int counted, View *view) {
  const int64_t words = ids->dtype.bits / 32;
  view->tensor = *ids;
  view->tensor.dtype = INT32;
  view->tensor.ndim = 3;
  view->tensor.shape = view->shape;
  view->tensor.strides = view->strides;
  view->shape[0] = counted ? ids->shape[0] : 0;
  view->shape[1] = ids->shape[1];
  view->shape[2] = words;
  view->strides[0] = ids->strides[0] * words;
  view->strides[1] = ids->strides[1] * words;
  view->strides[2] = 1;
  return viewed(view);
}

/* Those of the two that are not None, as an ffi Array; None where there is none of them. */
static TVMFFIAny paired(TVMFFIAny first, TVMFFIAny second, Pair *pair) {
  int64_t size = 0;
  if (first.type_index != kTVMFFINone) pair->items[size++] = first;
  if (second.type_index != kTVMFFINone) pair->items[size++] = second;
  if (size == 0) return NONE;
  pair->allocator[0] = pair->allocator[1] = 0;
  /* One reference, strong and weak, that nobody gives back: the object is never freed. */
  pair->object = (TVMFFIObject){.combined_ref_count = ((uint64_t)1 << 32) | 1, .type_index = kTVMFFIArray};
  pair->sequence = (TVMFFISeqCell){.data = pair->items, .size = size, .capacity = size};
  return (TVMFFIAny){.type_index = kTVMFFIArray, .v_obj = &pair->object};
}

/* Calls a kernel's launcher; the first error ends the layer, and Python raises it. */
#define LAUNCH(kernel, ...)                                                                                    \
  do {                                                                                                         \
    TVMFFIAny arguments[] = {__VA_ARGS__};                                                                     \
    TVMFFIAny nothing = NONE;                                                                                  \
    int status = TVMFFIFunctionCall(args[kernel].v_ptr, arguments, sizeof arguments / sizeof *arguments, &nothing); \
    if (status != 0) return status;                                                                            \
  } while (0)

TVM_FFI_DLL_EXPORT int __tvm_ffi_launch_layer(void *self, const TVMFFIAny *args, int32_t num_args, TVMFFIAny *result) {
  (void)self;
  (void)result;
  if (num_args != NUM_ARGS) {
    TVMFFIErrorSetRaisedFromCStr("TypeError", "launch_layer is called by another version of cutlass_moe");
    return -1;
  }
  const DLTensor *workspace = tensor_of(&args[WORKSPACE]);
  const int64_t *offsets = ((const TVMFFIShapeCell *)(args[OFFSETS].v_obj + 1))->data;
  const DLDataType dtype = tensor_of(&args[X_TH])->dtype;
  const int64_t hidden = tensor_of(&args[X_TH])->shape[1];
  const int64_t tokens = tensor_of(&args[IDS_TK])->shape[0], top_k = tensor_of(&args[IDS_TK])->shape[1], slots = tokens * top_k;
  const int64_t experts = tensor_of(&args[W_GATE_EIH])->shape[0], intermediate = tensor_of(&args[W_GATE_EIH])->shape[1];
  View views[B_DOWN_EH + 1 + 1 + H_MI + 1 + 3], *view = views;

#define CANONICAL(argument) canonical(&args[argument], view++)
  const TVMFFIAny x_TH = CANONICAL(X_TH), ids_TK = CANONICAL(IDS_TK), weights_TK = CANONICAL(WEIGHTS_TK);
  const TVMFFIAny w_gate_EIH = CANONICAL(W_GATE_EIH), w_up_EIH = CANONICAL(W_UP_EIH), w_down_EHI = CANONICAL(W_DOWN_EHI);
  const TVMFFIAny b_gate_EI = CANONICAL(B_GATE_EI), b_up_EI = CANONICAL(B_UP_EI), b_down_EH = CANONICAL(B_DOWN_EH);
  const TVMFFIAny out_TH = CANONICAL(OUT_TH);
#define VECTOR(buffer, type, length) carved(workspace, offsets[buffer], type, 1, length, 1, view++)
#define MATRIX(buffer, type, rows, columns) carved(workspace, offsets[buffer], type, 2, rows, columns, view++)
  const TVMFFIAny expert_offsets_E1 = VECTOR(EXPERT_OFFSETS_E1, INT32, experts + 1);
  const TVMFFIAny row_slot_M = VECTOR(ROW_SLOT_M, INT32, slots), row_token_M = VECTOR(ROW_TOKEN_M, INT32, slots);
  const TVMFFIAny slot_row_TK = MATRIX(SLOT_ROW_TK, INT32, tokens, top_k);
  const TVMFFIAny row_weight_M = VECTOR(ROW_WEIGHT_M, FLOAT32, slots);
  const TVMFFIAny chunk_counts_CE = MATRIX(CHUNK_COUNTS_CE, INT32, args[CHUNKS].v_int64, experts);
  const TVMFFIAny tile_counters_2 = VECTOR(TILE_COUNTERS_2, INT32, 2);
  /* Its two elements: a GEMM each. */
  const TVMFFIAny gate_counter_1 = VECTOR(TILE_COUNTERS_2, INT32, 1);
  const TVMFFIAny down_counter_1 = carved(workspace, offsets[TILE_COUNTERS_2] + 4, INT32, 1, 1, 1, view++);
  const TVMFFIAny rows_MH = MATRIX(ROWS_MH, dtype, slots, hidden), h_MI = MATRIX(H_MI, dtype, slots, intermediate);
  Pair gate_pair, down_pair;
  const TVMFFIAny gate_values = paired(b_gate_EI, b_up_EI, &gate_pair);
  const TVMFFIAny down_values = paired(b_down_EH, row_weight_M, &down_pair);
  const int counts = args[COUNTS_IDS].v_int64 != 0;
  const TVMFFIAny ids_TKW = words_of(ids_TK.v_ptr, counts, view++);
  const int gathers = args[PERMUTE].type_index == kTVMFFINone;

  LAUNCH(ROUTE, ids_TK, weights_TK, expert_offsets_E1, row_slot_M, row_token_M, slot_row_TK, row_weight_M, chunk_counts_CE,
         tile_counters_2);
  /* A GEMM may start early, before its predecessor ends, where the kernel before that wrote the expert offsets, or where it counts
   * them from the ids. */
  if (gathers) {
    LAUNCH(GATE_GEMM, x_TH, row_token_M, ids_TKW, w_gate_EIH, w_up_EIH, expert_offsets_E1, gate_values, NONE, h_MI, gate_counter_1,
           boolean(counts), args[SM_COUNT]);
  } else {
    LAUNCH(PERMUTE, x_TH, slot_row_TK, rows_MH);
    LAUNCH(GATE_GEMM, rows_MH, NONE, NONE, w_gate_EIH, w_up_EIH, expert_offsets_E1, gate_values, NONE, h_MI, gate_counter_1,
           boolean(1), args[SM_COUNT]);
  }
  /* Its rows take the place of the permuted tokens, whose last reader was the gate's GEMM. */
  LAUNCH(DOWN_GEMM, h_MI, NONE, NONE, w_down_EHI, NONE, expert_offsets_E1, down_values, row_slot_M, rows_MH, down_counter_1,
         boolean(1), args[SM_COUNT]);
  LAUNCH(COMBINE, rows_MH, slot_row_TK, out_TH);
  return 0;
}
