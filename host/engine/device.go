package engine

// Device is the kind of device that the stages compute on: "cpu", "metal" or "cuda".
func (e *Engine) Device() string {
	if e.remote != nil {
		return e.remote.Device()
	}
	choice, err := e.catalog.ForModelType(e.Model.ModelType)
	if err != nil {
		return "" // Open has told
	}
	return choice.Entry.Device.Kind
}
