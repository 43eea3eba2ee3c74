package main

import (
	"path/filepath"
	"testing"

	"github.com/mlxcel/mlxcel/mlxshared/stage/stagetest"
	"github.com/mlxcel/mlxcel/sdk"
)

func TestConformance(t *testing.T) {
	for name, family := range map[string]string{"gemma3-text-q4": "gemma3", "gemma4-e2b-q4": "gemma4", "gemma4-moe-q4": "gemma4"} {
		t.Run(name, func(t *testing.T) {
			stagetest.Conformance(t, families(), filepath.Join(parityRoot, name), family, 2, sdk.DtypeAuto)
		})
	}
}

func TestMissingTensors(t *testing.T) {
	parity().Each(t, func(t *testing.T, dir string) {
		stagetest.MissingTensors(t, families(), dir, "vision_tower", "audio_tower", "embed_vision", "embed_audio")
	})
}
