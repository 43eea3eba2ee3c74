package cluster

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/mlxcel/mlxcel/host/securelink"
	"github.com/mlxcel/mlxcel/sdk"
)

// Each refusal says what was wanted, what was got and what to change.
func TestRefusals(t *testing.T) {
	llama := sdk.Description{Name: "llama", Version: "1.0", Families: []sdk.Family{{Name: "llama", Pipeline: true}, {Name: "kimi_k3"}, {Name: "exaone", Pipeline: true, PlanOnly: true}}}
	gemma := sdk.Description{Name: "gemma4", Version: "1.0", Families: []sdk.Family{{Name: "gemma4", Pipeline: true}}}
	for _, tc := range []struct {
		code Code
		r    *Refusal
		want []string
	}{
		{CodeSecret, RefuseSecret(), []string{"--cluster-secret-file", "MLXCEL_CLUSTER_SECRET_FILE", "MLXCEL_CLUSTER_SECRET", "secret_file"}},
		{CodeProtocol, RefuseProtocol(5, 4), []string{"version 4, want 5"}},
		{CodeVersion, RefuseVersion("1.0", "1.1"), []string{`"1.1"`, `want "1.0"`, "install"}},
		{CodeCluster, RefuseCluster("a", "b"), []string{`"b"`, `want "a"`, "--cluster-name"}},
		{CodeCapability, RefuseCapability(Capability{Family: "gemma4", ModelType: "gemma4_text", Plugin: "/opt/x/gemma4", Folder: "/srv/plugins", There: []sdk.Description{llama}, Here: []sdk.Description{llama, gemma}}),
			[]string{"pipeline capability mismatch", "family gemma4 (model_type gemma4_text)", "the node has llama 1.0 [llama, kimi_k3 (unsplit only), exaone (plan only)]", "the coordinator llama 1.0 [", "gemma4 1.0 [gemma4]", "drop the executor gemma4 into /srv/plugins"}},
		{CodeCapability, RefuseCapability(Capability{Family: "gemma4", ModelType: "gemma4_text"}), []string{"the node has no executors", "an executor that serves gemma4", "--plugin-dir"}},
		{CodeModel, RefuseModel([]Difference{{"layers", "30", "31"}, {"weight file x", "5 bytes", "no such file"}}), []string{"layers: want 30, got 31; weight file x: want 5 bytes, got no such file", "--model"}},
		{CodeBusy, RefuseBusy("studio-1"), []string{"studio-1"}},
		{CodeMemory, RefuseMemory(3<<30, 1<<30), []string{"3.0 GiB", "1.0 GiB", "2.0 GiB short", "--parallel", "--pp-layers"}},
		{CodeAccelerator, RefuseAccelerator("metal", "cpu"), []string{"cpu, want metal"}},
		{CodeLayers, RefuseLayers(sdk.LayerRange{Start: 10, End: 40}, 30, "past the end"), []string{"layers 10 to 39 of a model with 30: past the end", "--pp-layers"}},
		{CodeEpoch, RefuseEpoch(7, 6), []string{"bring-up 6", "newest is 7"}},
	} {
		t.Run(string(tc.code), func(t *testing.T) {
			err := fmt.Errorf("stage-1 at 10.0.0.2:19001: %w", tc.r)
			if !errors.Is(err, &Refusal{Code: tc.code}) || errors.Is(err, &Refusal{Code: "other"}) {
				t.Errorf("is not of code %s", tc.code)
			}
			if tc.r.Remedy == "" {
				t.Error("no remedy")
			}
			for _, want := range tc.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%q lacks %q", err, want)
				}
			}
		})
	}
}

func TestFromHandshake(t *testing.T) {
	wrap := func(err error) error { return fmt.Errorf("dial: %w", err) }
	for _, tc := range []struct {
		err  error
		want Code
	}{
		{wrap(&securelink.ProtocolError{Want: 5, Got: 4}), CodeProtocol},
		{wrap(&securelink.SecretError{}), CodeSecret},
		{wrap(&securelink.RefusedError{Refusal: securelink.Refusal{Code: securelink.RefusedBusy, Text: "by x"}}), CodeBusy},
		{wrap(&securelink.RefusedError{Refusal: securelink.Refusal{Code: securelink.RefusedVersion}}), CodeVersion},
		{wrap(&securelink.RefusedError{Refusal: securelink.Refusal{Code: securelink.RefusedCluster}}), CodeCluster},
		{wrap(&securelink.RefusedError{Refusal: securelink.Refusal{Code: securelink.RefusedRole}}), ""},
		{errors.New("connection refused"), ""},
		{nil, ""},
	} {
		got := FromHandshake(tc.err)
		if got == nil && tc.want != "" || got != nil && got.Code != tc.want {
			t.Errorf("%v: %v, want %s", tc.err, got, tc.want)
		}
	}
}
