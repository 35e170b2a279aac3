// Whatever the text, reading ends in a configuration or in a ConfigError.
#include <gmock/gmock.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <random>
#include <string>

#include "pannier/engine/config_keys.h"
#include "pannier/engine/config_tree.h"
#include "tests/engine/config_text.h"

namespace pannier {
namespace {

using config::Json;

// Reads, and writes and reads again what was accepted.
void expect_no_surprise(const std::string& text) {
  try {
    const Config built = Config::from_text(text);
    EXPECT_EQ(Config::from_text(built.to_json()).to_json(), built.to_json()) << text;
  } catch (const ConfigError&) {
    // As good an end as any.
  } catch (const std::exception& error) {
    ADD_FAILURE() << error.what() << "\nof " << text;
  }
}

TEST(OddInput, AnyValueOfAnyKey) {
  const Json odd = Json::parse(R"([null, true, false, 0, 1, -1, 2, 0.5, 921.6, 1e308, -1e308, 18446744073709551615,
      "", "auto", "none", "cpu", "nvme", "24GiB", "bf16", "AdamW", "OneCycle", [], [1], [0.5, 0.5], [null], ["a"], {},
      {"type": "SGD"}, {"enabled": true}, {"device": "cpu"}, {"params": 5}, {"type": 5, "params": {"lr": "auto"}}])");
  std::vector<std::string> paths;
  for (const ConfigKey& key : config_keys()) {
    paths.push_back(key.path);
  }
  for (const std::string& path : paths) {
    std::string pointer = "/" + path;
    std::ranges::replace(pointer, '.', '/');
    for (const Json& value : odd) {
      Json root = {{"pannier", {{"unknown_keys", "warn"}}}};
      if (path != "pannier") {
        root[Json::json_pointer(pointer)] = value;
      }
      expect_no_surprise(root.dump());
      expect_no_surprise(Json{{path, value}}.dump());
    }
  }
}

TEST(OddInput, DamagedText) {
  const std::string sound = R"({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, // comment
      "optimizer": {"type": "Adam", "params": {"lr": 1e-5, "betas": [0.9, 0.999]}}, "steps_per_print": -Infinity,
      "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}}, /* more */ "fp16.enabled": true})";
  std::mt19937 random(7);
  const std::string letters = "{}[]\",:/*\\\n 0-eItn.\x80\x01";
  for (int round = 0; round < 3000; ++round) {
    std::string text = sound;
    for (std::size_t change = 0; change < 1 + random() % 3; ++change) {
      const std::size_t at = random() % text.size();
      switch (random() % 3) {
        case 0:
          text[at] = letters[random() % letters.size()];
          break;
        case 1:
          text.erase(at, 1 + random() % 8);
          break;
        default:
          text.insert(at, 1, letters[random() % letters.size()]);
      }
    }
    expect_no_surprise(text);
  }
}

TEST(OddInput, DeepNestingIsRefused) {
  const std::size_t depth = 10'000;
  std::string text;
  for (std::size_t level = 0; level < depth; ++level) {
    text += R"({"amp":)";
  }
  text += "1" + std::string(depth, '}');
  EXPECT_EQ(error_of(text), "configuration: not a configuration: nested more than 64 deep");
  EXPECT_EQ(error_of(R"({"amp": )" + std::string(depth, '[') + std::string(depth, ']') + "}"),
            "configuration: not a configuration: nested more than 64 deep");
}

}  // namespace
}  // namespace pannier
