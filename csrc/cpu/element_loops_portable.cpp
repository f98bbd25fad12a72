// The element loops for any CPU: 16-byte vectors, which x86-64 and arm64 both have.
#include "base/block_scale.h"
#include "base/combine.h"
#include "base/dtype.h"
#include "base/float_bits.h"
#include "base/random_bits.h"
#include "cpu/element_loops.h"

#define ROTA_ISA_NAMESPACE portable
#define ROTA_VECTOR_BYTES 16
#include "cpu/element_loops.inl"
