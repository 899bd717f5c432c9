// Package answers holds docs/answers.md to what there is: the tests and the chapters that it names.
package answers
