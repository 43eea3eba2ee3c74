package main

import (
	"path/filepath"
	"testing"

	"github.com/mlxcel/mlxcel/mlxshared/stage/stagetest"
	"github.com/mlxcel/mlxcel/sdk"
)

func TestConformance(t *testing.T) {
	for name, family := range map[string]string{"llama-tied-q4": "llama", "mistral-swa-q4": "mistral"} {
		t.Run(name, func(t *testing.T) {
			stagetest.Conformance(t, families(), filepath.Join(parityRoot, name), family, 2, sdk.DtypeAuto, sdk.DtypeFloat32)
		})
	}
}

func TestMissingTensors(t *testing.T) {
	parity().Each(t, func(t *testing.T, dir string) { stagetest.MissingTensors(t, families(), dir) })
}
