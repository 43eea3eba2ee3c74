package main

import (
	"testing"

	"github.com/mlxcel/mlxcel/sdk/example/leakyrnn"
	"github.com/mlxcel/mlxcel/sdk/sdktest"
)

// TestMain lets the test's own binary be the executor that TestProcess starts.
func TestMain(m *testing.M) { sdktest.Main(m, main) }

// model writes a small model and returns its folder.
func model(t *testing.T, tied bool) string {
	dir := t.TempDir()
	c := leakyrnn.Config{HiddenSize: 24, Layers: 4, VocabSize: 61, ContextLength: 256, Tied: tied}
	if err := leakyrnn.WriteRandom(dir, c, 1); err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestInProcess(t *testing.T) {
	sdktest.Run(t, sdktest.Config{New: leakyrnn.New, ModelDir: model(t, false), Family: leakyrnn.Family})
}

func TestInProcessTied(t *testing.T) {
	sdktest.Run(t, sdktest.Config{New: leakyrnn.New, ModelDir: model(t, true), Family: leakyrnn.Family})
}

func TestProcess(t *testing.T) {
	sdktest.Run(t, sdktest.Config{Launch: sdktest.Self(nil), ModelDir: model(t, false), Family: leakyrnn.Family, Cuts: 1})
}
