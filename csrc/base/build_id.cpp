#include "base/build_id.h"

#include <elf.h>
#include <link.h>

#include <cstdint>
#include <cstring>
#include <string_view>

namespace rota {
namespace {

struct Search {
  uintptr_t address;  // inside the library to find
  std::string id;
};

constexpr size_t rounded_up(size_t num_bytes) { return (num_bytes + 3) / 4 * 4; }

std::string hexadecimal(const unsigned char* bytes, size_t num_bytes) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string text;
  for (size_t i = 0; i < num_bytes; ++i) {
    text += kDigits[bytes[i] >> 4];
    text += kDigits[bytes[i] & 15];
  }
  return text;
}

// elf(5): each note is a header, its owner's name and its contents, both padded to 4 bytes.
std::string id_among_notes(const unsigned char* notes, size_t num_bytes) {
  while (num_bytes >= sizeof(ElfW(Nhdr))) {
    ElfW(Nhdr) header;
    std::memcpy(&header, notes, sizeof(header));
    const size_t contents = sizeof(header) + rounded_up(header.n_namesz);
    const size_t length = contents + rounded_up(header.n_descsz);
    if (length > num_bytes) return "";
    const bool is_gnus =
        header.n_namesz == sizeof(ELF_NOTE_GNU) &&
        std::memcmp(notes + sizeof(header), ELF_NOTE_GNU, sizeof(ELF_NOTE_GNU)) == 0;
    if (is_gnus && header.n_type == NT_GNU_BUILD_ID) {
      return hexadecimal(notes + contents, header.n_descsz);
    }
    notes += length;
    num_bytes -= length;
  }
  return "";
}

int look_at(dl_phdr_info* library, size_t, void* argument) {
  auto& search = *static_cast<Search*>(argument);
  bool is_it = false;
  std::string id;
  for (int i = 0; i < library->dlpi_phnum; ++i) {
    const ElfW(Phdr) & segment = library->dlpi_phdr[i];
    const uintptr_t begin = library->dlpi_addr + segment.p_vaddr;
    if (segment.p_type == PT_LOAD) {
      is_it |= begin <= search.address && search.address < begin + segment.p_memsz;
    } else if (segment.p_type == PT_NOTE && id.empty()) {
      id = id_among_notes(reinterpret_cast<const unsigned char*>(begin), segment.p_memsz);
    }
  }
  if (is_it) search.id = id;
  return is_it;
}

}  // namespace

std::string build_id() {
  Search search{.address = reinterpret_cast<uintptr_t>(&build_id), .id = {}};
  dl_iterate_phdr(&look_at, &search);
  return search.id;
}

}  // namespace rota
