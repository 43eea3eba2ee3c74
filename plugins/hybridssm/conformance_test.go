package main

import (
	"path/filepath"
	"testing"

	"github.com/mlxcel/mlxcel/mlxshared/stage/stagetest"
	"github.com/mlxcel/mlxcel/sdk"
)

func TestConformance(t *testing.T) {
	for name, family := range map[string]string{"jamba-base-q4": "jamba", "nemotron_h-moe-q4": "nemotron_h", "qwen3_5-base-q4": "qwen3_5"} {
		t.Run(name, func(t *testing.T) {
			stagetest.Conformance(t, families(), filepath.Join(parityRoot, name), family, 2, sdk.DtypeAuto)
		})
	}
}

func TestMissingTensors(t *testing.T) {
	parity().Each(t, func(t *testing.T, dir string) { stagetest.MissingTensors(t, families(), dir, "vision_tower") })
}
