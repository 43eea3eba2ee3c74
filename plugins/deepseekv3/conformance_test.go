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
	for name, family := range map[string]string{"deepseek_v3-base-q4": "deepseek_v3", "glm_moe_dsa-v32-q4": "glm_moe_dsa"} {
		t.Run(name, func(t *testing.T) {
			sdktest.Run(t, sdktest.Config{
				New: func(hclog.Logger) sdk.Executor {
					e := stage.New(stage.Options{Name: "deepseekv3", Version: "test", Families: families(), Device: mlx.DeviceCPU})
					t.Cleanup(func() {
						if err := e.Close(); err != nil {
							t.Error(err)
						}
					})
					return e
				},
				ModelDir: filepath.Join(parityRoot, name), Family: family,
				Dtypes: []sdk.Dtype{sdk.DtypeAuto}, Cuts: 1,
			})
		})
	}
}
