package sdk

import "fmt"

// Place names one executor of a pipeline: a rank of a stage. With one rank a stage, which is all that is built so far,
// Rank is 0 and a place reads as its stage's number.
type Place struct {
	Stage int // from 0, in the order of the layers
	Rank  int // within the stage's group, from 0
}

// String is "1" for the only or first rank of stage 1, and "1.2" for another.
func (p Place) String() string {
	if p.Rank == 0 {
		return fmt.Sprint(p.Stage)
	}
	return fmt.Sprintf("%d.%d", p.Stage, p.Rank)
}

// StageRole is what a place does with a step. It takes the place of arithmetic on stage numbers.
type StageRole struct {
	TakesTokens bool // it holds the embedding: its rows come as token ids
	TakesHidden bool // its rows come as hidden rows of the stage before
	GivesHidden bool // its hidden rows go to every place of the stage after
	Answers     bool // it reports what a step was to give: sampled tokens, scores, logits
}

// RoleOf returns the role of a place in a pipeline of that many stages. Every rank of a stage takes its input; the first
// alone gives the stage's output on and answers.
func RoleOf(p Place, stages int) StageRole {
	first, last := p.Stage == 0, p.Stage == stages-1
	return StageRole{
		TakesTokens: first,
		TakesHidden: !first,
		GivesHidden: !last && p.Rank == 0,
		Answers:     last && p.Rank == 0,
	}
}
