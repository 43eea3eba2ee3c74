package main

import (
	"path/filepath"
	"testing"

	"github.com/hashicorp/go-hclog"

	"github.com/mlxcel/mlxcel/sdk"
	"github.com/mlxcel/mlxcel/sdk/sdktest"
)

func TestConformance(t *testing.T) {
	for name, family := range map[string]string{"jamba-base-q4": "jamba", "nemotron_h-moe-q4": "nemotron_h", "qwen3_5-base-q4": "qwen3_5"} {
		t.Run(name, func(t *testing.T) {
			sdktest.Run(t, sdktest.Config{
				New:      func(hclog.Logger) sdk.Executor { return newExecutor(t) },
				ModelDir: filepath.Join(parityRoot, name), Family: family,
				Dtypes: []sdk.Dtype{sdk.DtypeAuto}, Cuts: 2,
			})
		})
	}
}
