// Element types of the device code. The 16-bit ones are moved and handed to the tensor cores, never computed with.
#pragma once

#include <cstdint>

namespace comppo::cuda {

struct BFloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

}  // namespace comppo::cuda
