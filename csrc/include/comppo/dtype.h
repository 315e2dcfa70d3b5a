// Element types of the raw-pointer interfaces.
#pragma once

#include <cstdint>

namespace comppo {

enum class DType : int32_t { kFloat32, kFloat64, kBFloat16, kFloat16 };

}  // namespace comppo
