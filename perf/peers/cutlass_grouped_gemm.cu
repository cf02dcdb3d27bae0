// Stock CUTLASS 3.x grouped GEMM for sm_90a (pointer arrays, TMA, cooperative WGMMA) behind a C interface.
// D_g = A_g * B_g^T for each group g: A_g [m, k] and B_g [n, k] with contiguous rows, bf16 in and out, fp32 inside.
#include <cuda_runtime.h>

#include <cute/tensor.hpp>
#include <cutlass/bfloat16.h>
#include <cutlass/cutlass.h>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cutlass/gemm/group_array_problem_shape.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>

namespace {

using Element = cutlass::bfloat16_t;
using RowMajor = cutlass::layout::RowMajor;
using ColumnMajor = cutlass::layout::ColumnMajor;
using ProblemShape = cutlass::gemm::GroupProblemShape<cute::Shape<int, int, int>>;
using TileShape = cute::Shape<cute::_128, cute::_256, cute::_64>;
using ClusterShape = cute::Shape<cute::_2, cute::_1, cute::_1>;
constexpr int kAlignment = 8;

using Epilogue = cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, TileShape, ClusterShape,
    cutlass::epilogue::collective::EpilogueTileAuto, float, float, Element, RowMajor*, kAlignment, Element, RowMajor*,
    kAlignment, cutlass::epilogue::PtrArrayTmaWarpSpecializedCooperative>::CollectiveOp;
using Mainloop = cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, RowMajor*, kAlignment, Element, ColumnMajor*,
    kAlignment, float, TileShape, ClusterShape,
    cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage))>,
    cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperative>::CollectiveOp;
using Kernel = cutlass::gemm::kernel::GemmUniversal<ProblemShape, Mainloop, Epilogue>;
using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;
using StrideA = typename Kernel::InternalStrideA;
using StrideB = typename Kernel::InternalStrideB;
using StrideD = typename Kernel::InternalStrideD;

// The caller passes shapes as three int32 and strides as one int64 a group.
static_assert(sizeof(ProblemShape::UnderlyingProblemShape) == 12);
static_assert(sizeof(StrideA) == 8 && sizeof(StrideB) == 8 && sizeof(StrideD) == 8);

typename Gemm::Arguments arguments(int groups, void* shapes, void* a, void* stride_a, void* b, void* stride_b, void* d,
                                   void* stride_d, int sm_count) {
  cutlass::KernelHardwareInfo hardware;
  hardware.device_id = 0;
  hardware.sm_count = sm_count;
  typename Gemm::Arguments result{
      cutlass::gemm::GemmUniversalMode::kGrouped,
      {groups, static_cast<ProblemShape::UnderlyingProblemShape*>(shapes), nullptr},
      {static_cast<const Element**>(a), static_cast<StrideA*>(stride_a), static_cast<const Element**>(b),
       static_cast<StrideB*>(stride_b)},
      {{}, static_cast<const Element**>(d), static_cast<StrideD*>(stride_d), static_cast<Element**>(d),
       static_cast<StrideD*>(stride_d)},
      hardware};
  result.epilogue.thread.alpha = 1.0f;
  result.epilogue.thread.beta = 0.0f;
  return result;
}

}  // namespace

// Bytes of workspace that cutlass_grouped_gemm_run needs.
extern "C" size_t cutlass_grouped_gemm_workspace(int groups, int sm_count) {
  return Gemm::get_workspace_size(
      arguments(groups, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, sm_count));
}

// All pointers are to device memory: shapes int32 [groups, 3]; a, b, d addresses [groups]; strides int64 [groups].
// Returns cutlass::Status: 0 when the kernel was launched on `stream`.
extern "C" int cutlass_grouped_gemm_run(int groups, void* shapes, void* a, void* stride_a, void* b, void* stride_b,
                                        void* d, void* stride_d, int sm_count, void* workspace, void* stream) {
  Gemm gemm;
  auto on = static_cast<cudaStream_t>(stream);
  auto with = arguments(groups, shapes, a, stride_a, b, stride_b, d, stride_d, sm_count);
  auto status = gemm.initialize(with, workspace, on);
  if (status == cutlass::Status::kSuccess) {
    status = gemm.run(on);
  }
  return static_cast<int>(status);
}
