// Package filename shows names of files to people and to programs. A name in Linux is any bytes but a slash and zero:
// it need not be UTF-8, and may hold what a terminal obeys. Both forms can be turned back into the name:
//
//	Quote   for terminals and messages: the name as a shell reads it. A plain name stays as it is, one with blanks or
//	        other characters of the shell is 'quoted', and one with bytes that are not to be printed is $'quoted\x1b'
//	        (bash, zsh, ksh, and POSIX from 2024 on).
//	JSON    for JSON: a string. A byte that is not part of UTF-8 is the lone surrogate \udc80 to \udcff, as Python has it
//	        in names of files (PEP 383): os.fsencode(json.loads(...)) is the name.
package filename
