package stage

const onApple = true
