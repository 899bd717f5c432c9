// Package freeze has processes of tests stand still.
package freeze

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"time"
)

// patience is how long a thread may take, such as one that waits for a disk.
const patience = 20 * time.Second

// Process stops a process by SIGSTOP and waits until all its threads stand still. The kernel wakes one of them, which sees to the others: on a busy
// machine they go on for a while after kill(2) has returned.
func Process(pid int) error {
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		return fmt.Errorf("SIGSTOP to process %d: %w", pid, err)
	}
	for began := time.Now(); ; time.Sleep(time.Millisecond) {
		still, err := standsStill(pid)
		if still || err != nil {
			return err
		}
		if time.Since(began) > patience {
			return fmt.Errorf("process %d does not stand still after %v", pid, patience)
		}
	}
}

func standsStill(pid int) (bool, error) {
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	if err != nil || len(tasks) == 0 {
		return false, fmt.Errorf("process %d has no threads (%v)", pid, err)
	}
	for _, task := range tasks {
		stat, err := os.ReadFile(task)
		if err != nil {
			continue // the thread has ended
		}
		// The name is in parentheses and may hold anything; the state is the letter after it.
		_, state, ok := bytes.Cut(stat[bytes.LastIndexByte(stat, ')'):], []byte(" "))
		if !ok || len(state) == 0 {
			return false, fmt.Errorf("%s: %q", task, stat)
		}
		switch state[0] {
		case 'T', 't', 'Z', 'X': // stopped, traced, ended
		default:
			return false, nil
		}
	}
	return true, nil
}
