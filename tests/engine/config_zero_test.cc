#include <gmock/gmock.h>

#include <string>

#include "tests/engine/config_text.h"

namespace pannier {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string zero_error(const std::string& section) { return error_of("{\"zero_optimization\": " + section + "}"); }
std::string zero_notes(const std::string& section) { return notes_of("{\"zero_optimization\": " + section + "}"); }
Zero zero_of(const std::string& section) { return Config::from_text("{\"zero_optimization\": " + section + "}").zero; }

TEST(Zero, ReadsEveryHome) {
  const Zero zero = zero_of(R"({"stage": 3, "ignore_unused_parameters": false,
      "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "buffer_size": "100MiB", "pin_memory": false},
      "offload_param": {"device": "cpu", "buffer_count": 7, "buffer_size": 1e6, "max_in_cpu": 0},
      "stage3_gather_16bit_weights_on_model_save": true})");
  EXPECT_EQ(zero.optimizer_home, Home::kNvme);
  EXPECT_THAT(zero.optimizer_nvme_paths, ElementsAre("/nvme"));
  EXPECT_EQ(zero.buffer_nbytes, std::size_t{100} << 20);
  EXPECT_FALSE(zero.pin_memory);
  EXPECT_FALSE(zero.ignore_unused_parameters);
  EXPECT_EQ(zero.param_home, Home::kHost);
  EXPECT_EQ(zero.param_buffer_count, 7);
  EXPECT_EQ(zero.param_buffer_numel, 1'000'000);
  EXPECT_EQ(zero.param_max_in_host_numel, 0);
  EXPECT_TRUE(zero.gather_16bit_weights_on_model_save);
}

TEST(Zero, NamesBothKeysOfAPairThatCannotWork) {
  EXPECT_THAT(zero_error(R"({"stage": 2, "offload_param": {"device": "cpu"}})"),
              AllOf(HasSubstr("zero_optimization.offload_param.device"),
                    HasSubstr("offload_param needs zero_optimization.stage 3, but the stage is 2")));
  EXPECT_THAT(zero_error(R"({"stage": 0, "offload_optimizer": {"device": "cpu"}})"),
              HasSubstr("offload_optimizer needs zero_optimization.stage 1, 2 or 3, but the stage is 0"));
  EXPECT_THAT(zero_error(R"({"offload_optimizer": {"device": "cpu"}})"), HasSubstr("but the stage is 0"));
  EXPECT_THAT(zero_error(R"({"stage": 2, "offload_optimizer": {"device": "nvme"}})"),
              HasSubstr("zero_optimization.offload_optimizer.nvme_path: the device \"nvme\" needs a folder"));
  EXPECT_THAT(zero_error(R"({"stage": 3, "offload_param": {"device": "nvme", "nvme_path": null}})"),
              HasSubstr("zero_optimization.offload_param.nvme_path: the device \"nvme\" needs a folder"));
  EXPECT_THAT(zero_error(R"({"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/n", "ratio": 0.5}})"),
              HasSubstr("zero_optimization.offload_optimizer.ratio: 0.5 can't go with the device \"nvme\""));
}

TEST(Zero, NodesNeedPartitionedParameters) {
  EXPECT_EQ(zero_of(R"({"stage": 3, "zero_hpz_partition_size": 8})").node_size, 8);
  EXPECT_THAT(zero_notes(R"({"stage": 2, "zero_hpz_partition_size": 8})"),
              HasSubstr("zero_hpz_partition_size: without effect, since parameters are not partitioned at stage 2"));
}

TEST(Zero, SaysAWrongStageOnce) {
  EXPECT_THAT(zero_error(R"({"stage": "3", "offload_param": {"device": "cpu"}})"),
              HasSubstr("configuration: zero_optimization.stage: wanted"));
  EXPECT_EQ(zero_error(R"({"stage": "auto", "offload_param": {"device": "cpu"}})"), "accepted");
  // Another error does not hide the pair.
  EXPECT_THAT(error_of(R"({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}, "gradient_clipping": -1})"),
              AllOf(HasSubstr("but the stage is 0"), HasSubstr("gradient_clipping")));
}

TEST(Zero, TakesStage1WithOffload) {
  EXPECT_EQ(zero_of(R"({"stage": 1, "offload_optimizer": {"device": "cpu"}})").optimizer_home, Home::kHost);
}

TEST(Zero, ReadsDeprecatedCpuOffload) {
  const char* text = R"({"stage": 2, "cpu_offload": true, "cpu_offload_use_pin_memory": false})";
  EXPECT_EQ(zero_of(text).optimizer_home, Home::kHost);
  EXPECT_FALSE(zero_of(text).pin_memory);
  EXPECT_THAT(zero_notes(text), HasSubstr("zero_optimization.cpu_offload: deprecated; write \"offload_optimizer\": "
                                          "{\"device\": \"cpu\"}"));
  EXPECT_EQ(zero_of(R"({"stage": 3, "cpu_offload_param": true})").param_home, Home::kHost);
  EXPECT_EQ(zero_of(R"({"stage": 2, "cpu_offload": false})").optimizer_home, Home::kDevice);
  EXPECT_EQ(zero_of(R"({"stage": 2, "cpu_offload": null})").optimizer_home, Home::kDevice);
  EXPECT_THAT(zero_notes(R"({"stage": 2, "cpu_offload_use_pin_memory": true})"), HasSubstr("without effect"));
  EXPECT_EQ(zero_of(R"({"stage": 2, "cpu_offload": true, "offload_optimizer": null})").optimizer_home, Home::kHost);
}

TEST(Zero, RefusesCpuOffloadBesideItsSuccessor) {
  EXPECT_THAT(zero_error(R"({"stage": 2, "cpu_offload": true, "offload_optimizer": {"device": "cpu"}})"),
              HasSubstr("zero_optimization.cpu_offload: given together with zero_optimization.offload_optimizer"));
  EXPECT_THAT(zero_error(R"({"stage": 3, "cpu_offload_param": true, "offload_param": {}})"),
              HasSubstr("given together with zero_optimization.offload_param"));
  EXPECT_THAT(zero_error(R"({"stage": 2, "cpu_offload": "true"})"),
              HasSubstr("zero_optimization.cpu_offload: wanted true or false, got \"true\""));
}

TEST(Zero, ReadsABooleanOfOldReleases) {
  EXPECT_EQ(zero_of("true").stage, 1);
  EXPECT_EQ(zero_of("false").stage, 0);
  EXPECT_THAT(zero_notes("true"), HasSubstr("a boolean is deprecated, read as {\"stage\": 1}"));
}

TEST(Zero, NamesTheAliasThatWasWritten) {
  EXPECT_THAT(zero_error(R"({"stage3_max_live_params": -1})"),
              HasSubstr("zero_optimization.stage3_max_live_parameters (written "
                        "zero_optimization.stage3_max_live_params): wanted"));
  EXPECT_THAT(zero_error(R"({"stage3_max_live_params": 1, "max_live_parameters": 2})"),
              HasSubstr("which means the same"));
  EXPECT_THAT(zero_notes(R"({"stage": 3, "stage3_gather_fp16_weights_on_model_save": true})"),
              HasSubstr("deprecated, read as zero_optimization.stage3_gather_16bit_weights_on_model_save"));
}

TEST(Supported, RefusesWhatThisVersionCannotRun) {
  const auto refusal = [](const char* text) {
    return error_of_call([&] { Config::from_text(text).require_supported(); });
  };
  const std::string nvme = R"({"zero_optimization": {"stage": 2, "offload_optimizer":
                               {"device": "nvme", "nvme_path": ["/n", "/m"]}})";
  EXPECT_EQ(refusal((nvme + "}").c_str()), "accepted");
  EXPECT_THAT(refusal((nvme + R"(, "pannier": {"overlap_step": true, "streamed_share": 0.5}})").c_str()),
              AllOf(HasSubstr("pannier.overlap_step"), HasSubstr("pannier.streamed_share")));
  EXPECT_EQ(refusal((nvme + R"(, "pannier": {"overlap_step": true}})").c_str()), "accepted");
  const std::string parameters = R"({"zero_optimization": {"stage": 3, "offload_param":
                                     {"device": "nvme", "nvme_path": "/n"}})";
  EXPECT_EQ(refusal((parameters + "}").c_str()), "accepted");
  EXPECT_THAT(refusal((parameters + R"(, "pannier": {"overlap_step": true}})").c_str()),
              HasSubstr("overlap_step with zero_optimization.offload_param.device"));
  EXPECT_THAT(refusal(R"({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}})"),
              HasSubstr("offload_optimizer.ratio: this version"));
  EXPECT_EQ(refusal(R"({"gradient_allreduce_op": "SUM"})"), "accepted");
  EXPECT_EQ(refusal(R"({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}})"), "accepted");
  EXPECT_EQ(refusal(R"({"pannier": {"overlap_step": true}})"), "accepted");
  EXPECT_EQ(refusal("{}"), "accepted");
}

TEST(Home, HasTheNameThatTheConfigurationWrites) {
  EXPECT_STREQ(to_string(Home::kDevice), "none");
  EXPECT_STREQ(to_string(Home::kHost), "cpu");
  EXPECT_STREQ(to_string(Home::kNvme), "nvme");
}

}  // namespace
}  // namespace pannier
