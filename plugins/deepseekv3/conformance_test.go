package main

import (
	"path/filepath"
	"testing"

	"github.com/mlxcel/mlxcel/mlxshared/stage/stagetest"
	"github.com/mlxcel/mlxcel/sdk"
)

func TestConformance(t *testing.T) {
	for name, family := range map[string]string{"deepseek_v3-base-q4": "deepseek_v3", "glm_moe_dsa-v32-q4": "glm_moe_dsa"} {
		t.Run(name, func(t *testing.T) {
			stagetest.Conformance(t, families(), filepath.Join(parityRoot, name), family, 1, sdk.DtypeAuto)
		})
	}
}

func TestMissingTensors(t *testing.T) {
	parity().Each(t, func(t *testing.T, dir string) { stagetest.MissingTensors(t, families(), dir, ".61.") })
}
