#include "tensor/cuda/self_test_record.h"

#include <stdlib.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string_view>

#include "base/build_id.h"
#include "base/error.h"

namespace rota::tensors {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kFailed = "failed ";

std::string environment(const char* name) {
  const char* text = std::getenv(name);
  return text == nullptr ? "" : text;
}

// Empty if there is no place for the record.
fs::path folder() {
  if (const std::string own = environment("ROTA_CACHE_DIR"); !own.empty()) return own;
  // The XDG base directory specification says to ignore relative paths.
  if (const fs::path cache = environment("XDG_CACHE_HOME"); cache.is_absolute()) {
    return cache / "rota";
  }
  const std::string home = environment("HOME");
  return home.empty() ? fs::path() : fs::path(home) / ".cache" / "rota";
}

fs::path path_of(const cuda::GpuInfo& gpu) {
  return folder() / join("self-test-", gpu.uuid, ".txt");
}

// States what the results are valid for. They follow line by line, then comes `ending`.
std::string heading(const cuda::GpuInfo& gpu) {
  return join("rota self-test\ngpu ", gpu.name, ' ', gpu.uuid, "\ndriver ", gpu.driver, "\nbuild ",
              build_id(), '\n');
}

std::string ending(size_t num_failed) { return join(num_failed, " failed\n"); }

std::string text_of(const cuda::GpuInfo& gpu, const std::vector<std::string>& findings) {
  std::string text = heading(gpu);
  for (const std::string& finding : findings) text += join(kFailed, finding, '\n');
  return text + ending(findings.size());
}

// Writes a new file with a unique name beside `path`, then renames it to `path`.
void replace(const fs::path& path, const std::string& text) {
  std::string temporary = path.string() + ".XXXXXX";
  const int file = mkstemp(temporary.data());
  if (file < 0) return;
  const bool is_written =
      write(file, text.data(), text.size()) == static_cast<ssize_t>(text.size());
  close(file);
  std::error_code error;
  if (is_written) fs::rename(temporary, path, error);
  if (!is_written || error) fs::remove(temporary, error);
}

// None if the text differs from what would be written now.
std::optional<std::vector<std::string>> parse(const std::string& text, const cuda::GpuInfo& gpu) {
  const std::string begin = heading(gpu);
  if (!text.starts_with(begin)) return std::nullopt;
  std::vector<std::string> findings;
  std::istringstream lines(text.substr(begin.size()));
  for (std::string line; std::getline(lines, line) && line.starts_with(kFailed);) {
    findings.push_back(line.substr(kFailed.size()));
  }
  if (text != text_of(gpu, findings)) return std::nullopt;
  return findings;
}

}  // namespace

std::optional<std::vector<std::string>> read_self_test_record(const cuda::GpuInfo& gpu) {
  if (folder().empty() || build_id().empty()) return std::nullopt;
  try {
    std::ifstream file(path_of(gpu), std::ios::binary);
    return parse({std::istreambuf_iterator<char>(file), {}}, gpu);
  } catch (const std::ios_base::failure&) {
    return std::nullopt;  // the path is a folder
  }
}

void write_self_test_record(const cuda::GpuInfo& gpu,
                            const std::vector<std::string>& findings) noexcept {
  try {
    if (folder().empty() || build_id().empty()) return;
    std::error_code error;
    fs::create_directories(folder(), error);
    replace(path_of(gpu), text_of(gpu, findings));
  } catch (const std::exception&) {
    // Out of memory, or an invalid path.
  }
}

}  // namespace rota::tensors
