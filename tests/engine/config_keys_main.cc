// Prints every key of the configuration, tab-separated: path, status, default. tests/python compares it to the docs.
#include <cstdio>

#include "pannier/engine/config.h"

int main() {
  for (const pannier::ConfigKey& key : pannier::config_keys()) {
    std::printf("%s\t%s\t%s\n", key.path.c_str(), key.status.c_str(), key.default_value.c_str());
  }
}
