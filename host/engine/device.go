package engine

import "github.com/mlxcel/mlxcel/sdk"

// Device is what the stages compute on, the first stage's where they are on several machines: all are of one kind.
func (e *Engine) Device() sdk.Device {
	if e.remote != nil {
		return e.remote.Device()
	}
	choice, err := e.catalog.ForModelType(e.Model.ModelType)
	if err != nil {
		return sdk.Device{} // Open has told
	}
	return choice.Entry.Device
}
