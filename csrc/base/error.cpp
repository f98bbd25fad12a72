#include "base/error.h"

#include <cstring>

namespace rota {

std::string with_errno(std::string_view what, int error_number) {
  return join(what, ": ", std::strerror(error_number));
}

}  // namespace rota
