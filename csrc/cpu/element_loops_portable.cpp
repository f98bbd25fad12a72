// The element loops for any CPU: 16-byte vectors, which x86-64 and arm64 both have.
#include "base/dtype.h"
#include "cpu/element_loops.h"

#define ROTA_ISA_NAMESPACE portable
#define ROTA_VECTOR_BYTES 16
#include "cpu/element_loops.inl"
