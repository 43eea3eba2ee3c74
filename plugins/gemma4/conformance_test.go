package main

import (
	"path/filepath"
	"testing"

	"github.com/hashicorp/go-hclog"

	"github.com/mlxcel/mlxcel/sdk"
	"github.com/mlxcel/mlxcel/sdk/sdktest"
)

func TestConformance(t *testing.T) {
	for name, family := range map[string]string{"gemma3-text-q4": "gemma3", "gemma4-e2b-q4": "gemma4", "gemma4-moe-q4": "gemma4"} {
		t.Run(name, func(t *testing.T) {
			sdktest.Run(t, sdktest.Config{
				New:      func(hclog.Logger) sdk.Executor { return newExecutor(t) },
				ModelDir: filepath.Join(parityRoot, name), Family: family,
				Dtypes: []sdk.Dtype{sdk.DtypeAuto}, Cuts: 2,
			})
		})
	}
}
