package house

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/importer"
	"go/parser"
	"go/scanner"
	"go/token"
	"go/types"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/weftfs/weft/test/harness"
)

// budgets are ceilings. Whoever comes to be below one lowers it.
var budgets = []struct {
	what    string
	most    int
	measure func(*tree) (n int, where string)
}{
	{"lines of the largest package that is no codec", 12680, largestPackage},
	{"packages of more than 4,000 lines that are no codec", 9, largePackages},
	{"methods of one type, promoted ones and functions whose first parameter it is included", 351, methods},
	{"methods that an interface has of its own", 48, ownMethods},
	{"functions of more than 60 lines", 69, longFunctions},
	{"functions that lock a mutex more than twice", 26, lockedAgain},
	{"functions that release a lock that they were handed", 31, handedLocks},
	{"types whose methods lock the main mutex of the metadata service", 3, mainMutex},
	{"arrows between the files of a package in server/ that run back up", 220, backArrows},
	{"exported names that one other package uses", 645, usedOnce},
	{"packages that no program has, and whose paths do not say that they are for tests", 1, unused},
	{"folders of test/", 33, testFolders},
	{"lines of code outside test/, without comments and blank ones", 99920, codeLines},
}

func TestBudgets(t *testing.T) {
	tr := load(t)
	for _, b := range budgets {
		n, where := b.measure(tr)
		t.Logf("%6d of %6d  %s: %s", n, b.most, b.what, where)
		if n > b.most {
			t.Errorf("%s: %d, want %d at most: %s", b.what, n, b.most, where)
		}
	}
}

// tree is the module without its tests.
type tree struct {
	fset     *token.FileSet
	packages []*source       // without test/
	programs map[string]bool // what the programs outside test/ consist of
}

// source is a package, type-checked.
type source struct {
	path  string // below the module
	files []*ast.File
	text  [][]byte // of files
	info  *types.Info
	types *types.Package
}

// load reads the packages, and the types of what they import from what the compiler has made.
func load(t *testing.T) *tree {
	cmd := exec.Command("go", "list", "-export", "-deps", "-json=ImportPath,Name,Dir,GoFiles,Export,Deps", "./...")
	cmd.Dir = harness.Root
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	type listed struct {
		ImportPath, Name, Dir, Export string
		GoFiles, Deps                 []string
	}
	var own []listed
	exports := map[string]string{}
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var p listed
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		exports[p.ImportPath] = p.Export
		if strings.HasPrefix(p.ImportPath, module) {
			own = append(own, p)
		}
	}
	tr := &tree{fset: token.NewFileSet(), programs: map[string]bool{}}
	compiled := importer.ForCompiler(tr.fset, "gc", func(path string) (io.ReadCloser, error) { return os.Open(exports[path]) })
	for _, p := range own {
		path := strings.TrimPrefix(p.ImportPath, module)
		if below(path, "test") {
			continue
		}
		if p.Name == "main" {
			for _, part := range append(p.Deps, p.ImportPath) {
				tr.programs[strings.TrimPrefix(part, module)] = true
			}
		}
		s := &source{path: path, info: &types.Info{
			Uses: map[*ast.Ident]types.Object{}, Defs: map[*ast.Ident]types.Object{},
			Types: map[ast.Expr]types.TypeAndValue{},
		}}
		for _, name := range p.GoFiles {
			text, err := os.ReadFile(filepath.Join(p.Dir, name))
			if err != nil {
				t.Fatal(err)
			}
			f, err := parser.ParseFile(tr.fset, filepath.Join(path, name), text, parser.SkipObjectResolution)
			if err != nil {
				t.Fatal(err)
			}
			s.files, s.text = append(s.files, f), append(s.text, text)
		}
		conf := types.Config{Importer: compiled}
		if s.types, err = conf.Check(p.ImportPath, tr.fset, s.files, s.info); err != nil {
			t.Fatal(err)
		}
		tr.packages = append(tr.packages, s)
	}
	if len(tr.packages) < 30 {
		t.Fatalf("%d packages outside test/", len(tr.packages))
	}
	return tr
}

func (tr *tree) lines(from, to token.Pos) int {
	return tr.fset.Position(to).Line - tr.fset.Position(from).Line + 1
}

// packageLines are those of all files of the packages that are no codecs.
func (tr *tree) packageLines() map[string]int {
	lines := map[string]int{}
	for _, s := range tr.packages {
		if !below(s.path, "internal/wire") {
			for _, f := range s.files {
				lines[s.path] += tr.fset.File(f.FileStart).LineCount()
			}
		}
	}
	return lines
}

func largestPackage(tr *tree) (int, string) { return most(tr.packageLines()) }

func largePackages(tr *tree) (int, string) {
	lines := tr.packageLines()
	maps.DeleteFunc(lines, func(_ string, n int) bool { return n <= 4000 })
	return len(lines), list(lines)
}

// methods counts what has a type as its receiver or first parameter.
func methods(tr *tree) (int, string) {
	count := map[string]int{}
	for _, s := range tr.packages {
		for _, name := range s.types.Scope().Names() {
			switch o := s.types.Scope().Lookup(name).(type) {
			case *types.TypeName:
				if !types.IsInterface(o.Type()) && !o.IsAlias() {
					count[s.path+"."+name] += types.NewMethodSet(types.NewPointer(o.Type())).Len()
				}
			case *types.Func:
				params := o.Signature().Params()
				if params.Len() == 0 {
					continue
				}
				first := params.At(0).Type()
				if p, ok := first.(*types.Pointer); ok {
					first = p.Elem()
				}
				if named, ok := first.(*types.Named); ok && named.Obj().Pkg() == s.types && !types.IsInterface(named) {
					count[s.path+"."+named.Obj().Name()]++
				}
			}
		}
	}
	return most(count)
}

func ownMethods(tr *tree) (int, string) {
	count := map[string]int{}
	for _, s := range tr.packages {
		for _, name := range s.types.Scope().Names() {
			if o, ok := s.types.Scope().Lookup(name).(*types.TypeName); ok {
				if i, ok := o.Type().Underlying().(*types.Interface); ok {
					count[s.path+"."+name] = i.NumExplicitMethods()
				}
			}
		}
	}
	return most(count)
}

// functions calls f for each function that is declared.
func (tr *tree) functions(f func(s *source, decl *ast.FuncDecl, name string)) {
	for _, s := range tr.packages {
		for _, file := range s.files {
			for _, d := range file.Decls {
				if decl, ok := d.(*ast.FuncDecl); ok && decl.Body != nil {
					f(s, decl, s.path+"."+s.info.Defs[decl.Name].(*types.Func).FullName())
				}
			}
		}
	}
}

func longFunctions(tr *tree) (int, string) {
	long := map[string]int{}
	tr.functions(func(_ *source, decl *ast.FuncDecl, name string) {
		if n := tr.lines(decl.Pos(), decl.End()); n > 60 {
			long[name] = n
		}
	})
	return len(long), list(long)
}

// locking is a call that takes or releases a mutex.
type locking struct {
	mutex    ast.Expr
	releases bool
}

// lockings are those in a function, in the order of its text, with what is deferred and the functions inside it.
func (s *source) lockings(decl *ast.FuncDecl) (calls []locking) {
	ast.Inspect(decl.Body, func(n ast.Node) bool {
		call, ok := n.(*ast.CallExpr)
		if !ok {
			return true
		}
		sel, ok := call.Fun.(*ast.SelectorExpr)
		if !ok {
			return true
		}
		if f, ok := s.info.Uses[sel.Sel].(*types.Func); ok {
			switch f.FullName() {
			case "(*sync.Mutex).Lock", "(*sync.RWMutex).Lock", "(*sync.RWMutex).RLock":
				calls = append(calls, locking{sel.X, false})
			case "(*sync.Mutex).Unlock", "(*sync.RWMutex).Unlock", "(*sync.RWMutex).RUnlock":
				calls = append(calls, locking{sel.X, true})
			}
		}
		return true
	})
	return calls
}

func lockedAgain(tr *tree) (int, string) {
	again := map[string]int{}
	tr.functions(func(s *source, decl *ast.FuncDecl, name string) {
		locks := map[string]int{}
		for _, l := range s.lockings(decl) {
			if !l.releases {
				locks[types.ExprString(l.mutex)]++
			}
		}
		if n, _ := most(locks); n > 2 {
			again[name] = n
		}
	})
	return len(again), list(again)
}

// handedLocks are of functions in which the first and the last that is done with a mutex is to release it.
func handedLocks(tr *tree) (int, string) {
	handed := map[string]int{}
	tr.functions(func(s *source, decl *ast.FuncDecl, name string) {
		first, last := map[string]bool{}, map[string]bool{}
		for _, l := range s.lockings(decl) {
			mutex := types.ExprString(l.mutex)
			if _, ok := first[mutex]; !ok {
				first[mutex] = l.releases
			}
			last[mutex] = l.releases
		}
		for mutex, releases := range first {
			if releases && last[mutex] {
				handed[name]++
			}
		}
	})
	return len(handed), list(handed)
}

func mainMutex(tr *tree) (int, string) {
	lockers := map[string]int{}
	tr.functions(func(s *source, decl *ast.FuncDecl, _ string) {
		if s.path != "server/meta" {
			return
		}
		for _, l := range s.lockings(decl) {
			sel, ok := l.mutex.(*ast.SelectorExpr)
			if !ok || l.releases || sel.Sel.Name != "mu" || !strings.HasSuffix(s.info.TypeOf(sel.X).String(), "server/meta.Service") {
				continue
			}
			by := "functions"
			if decl.Recv != nil {
				by = strings.TrimPrefix(types.ExprString(decl.Recv.List[0].Type), "*")
			}
			lockers[by]++
		}
	})
	return len(lockers), list(lockers)
}

// backArrows: a file uses names that another file declares. The files are put into an order with few arrows against it
// (Eades, Lin, Smyth: A fast and effective heuristic for the feedback arc set problem, 1993).
func backArrows(tr *tree) (int, string) {
	back := map[string]int{}
	for _, s := range tr.packages {
		if !below(s.path, "server") {
			continue
		}
		uses := map[string]map[string]bool{}
		for id, o := range s.info.Uses {
			if o.Pkg() != s.types {
				continue
			}
			from, to := tr.fset.Position(id.Pos()).Filename, tr.fset.Position(o.Pos()).Filename
			if from == to {
				continue
			}
			for _, f := range []string{from, to} {
				if uses[f] == nil {
					uses[f] = map[string]bool{}
				}
			}
			uses[from][to] = true
		}
		n := 0
		order := downwards(uses)
		for i, from := range order {
			for _, to := range order[:i] {
				if uses[from][to] {
					n++
				}
			}
		}
		if n > 0 {
			back[s.path] = n
		}
	}
	sum := 0
	for _, n := range back {
		sum += n
	}
	return sum, list(back)
}

// downwards orders what uses something before what it uses, as far as that is possible.
func downwards(uses map[string]map[string]bool) []string {
	left := slices.Sorted(maps.Keys(uses))
	var top, bottom []string
	for len(left) > 0 {
		best, bestAt, sink := -len(uses), -1, -1
		for i, f := range left {
			out, in := 0, 0
			for _, g := range left {
				if uses[f][g] {
					out++
				}
				if uses[g][f] {
					in++
				}
			}
			if out == 0 {
				sink = i
			}
			if in == 0 {
				out += len(uses)
			}
			if out-in > best {
				best, bestAt = out-in, i
			}
		}
		at := bestAt
		if sink >= 0 {
			at = sink
			bottom = append(bottom, left[at])
		} else {
			top = append(top, left[at])
		}
		left = slices.Delete(left, at, at+1)
	}
	slices.Reverse(bottom)
	return append(top, bottom...)
}

// usedOnce counts package-level names.
func usedOnce(tr *tree) (int, string) {
	users := map[string]map[string]bool{}
	for _, s := range tr.packages {
		for _, o := range s.info.Uses {
			if o.Pkg() == nil || o.Pkg() == s.types || !strings.HasPrefix(o.Pkg().Path(), module) || o.Parent() != o.Pkg().Scope() {
				continue
			}
			name := strings.TrimPrefix(o.Pkg().Path(), module) + "." + o.Name()
			if users[name] == nil {
				users[name] = map[string]bool{}
			}
			users[name][s.path] = true
		}
	}
	count := map[string]int{}
	for name, by := range users {
		if len(by) == 1 {
			count[name[:strings.LastIndex(name, ".")]]++
		}
	}
	sum := 0
	for _, n := range count {
		sum += n
	}
	return sum, list(count)
}

// unused counts the packages of no program. The path of a package for tests has a name in it that ends in "test".
func unused(tr *tree) (int, string) {
	alone := map[string]int{}
	for _, s := range tr.packages {
		if !tr.programs[s.path] && !strings.Contains(s.path+"/", "test/") {
			alone[s.path] = 1
		}
	}
	return len(alone), list(alone)
}

func testFolders(*tree) (int, string) {
	entries, err := os.ReadDir(filepath.Join(harness.Root, "test"))
	if err != nil {
		return 1 << 30, err.Error()
	}
	return len(entries), ""
}

func codeLines(tr *tree) (int, string) {
	count := map[string]int{}
	for _, s := range tr.packages {
		for _, text := range s.text {
			count[s.path] += code(text)
		}
	}
	sum := 0
	for _, n := range count {
		sum += n
	}
	return sum, list(count)
}

// code counts the lines with something on them that is no comment.
func code(text []byte) int {
	fset := token.NewFileSet()
	file := fset.AddFile("", -1, len(text))
	var s scanner.Scanner
	s.Init(file, text, nil, 0)
	lines := map[int]bool{}
	for {
		pos, tok, literal := s.Scan()
		if tok == token.EOF {
			return len(lines)
		}
		if tok == token.SEMICOLON && literal == "\n" {
			continue
		}
		for i := range 1 + strings.Count(literal, "\n") {
			lines[file.Line(pos)+i] = true
		}
	}
}

// most returns the largest value and its key.
func most(m map[string]int) (n int, key string) {
	for _, k := range slices.Sorted(maps.Keys(m)) {
		if m[k] > n {
			n, key = m[k], k
		}
	}
	return n, key
}

// list shows the largest values and their keys.
func list(m map[string]int) string {
	keys := slices.SortedFunc(maps.Keys(m), func(a, b string) int { return cmp.Or(m[b]-m[a], cmp.Compare(a, b)) })
	var b strings.Builder
	for _, k := range keys[:min(len(keys), 15)] {
		fmt.Fprintf(&b, "%s %d, ", strings.ReplaceAll(k, module, ""), m[k])
	}
	return strings.TrimSuffix(b.String(), ", ")
}
