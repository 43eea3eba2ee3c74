package main

import (
	"path/filepath"
	"testing"

	"github.com/hashicorp/go-hclog"

	"github.com/mlxcel/mlxcel/mlxshared/mlx"
	"github.com/mlxcel/mlxcel/mlxshared/stage"
	"github.com/mlxcel/mlxcel/sdk"
	"github.com/mlxcel/mlxcel/sdk/sdktest"
)

func TestConformance(t *testing.T) {
	for name, family := range map[string]string{"llama-tied-q4": "llama", "mistral-swa-q4": "mistral"} {
		t.Run(name, func(t *testing.T) {
			sdktest.Run(t, sdktest.Config{
				New: func(hclog.Logger) sdk.Executor {
					e := stage.New(stage.Options{Name: "llama", Version: "test", Families: families(), Device: mlx.DeviceCPU})
					t.Cleanup(func() {
						if err := e.Close(); err != nil {
							t.Error(err)
						}
					})
					return e
				},
				ModelDir: filepath.Join(parityRoot, name), Family: family,
				Dtypes: []sdk.Dtype{sdk.DtypeAuto, sdk.DtypeFloat32}, Cuts: 2,
			})
		})
	}
}
