// Command fields prints how Go reads and writes each field of the API's types: a JSON object of definition, field and a
// text. controlplane/schemas/data/generate.py reads it. The text has three words. The first is a letter:
//
//	o  omitted if zero or empty
//	p  a pointer: omitted if absent, written even if zero
//	z  always written; an absent one as its zero value
//	n  always written; an absent one as null
//
// The second is the Go type of the field, as decoding errors name it. The third is the path of the embedded structs that
// the field is in, such as "VolumeSource.", or empty.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"reflect"
	"strings"

	apiextensions "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/scheme"
	aggregation "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"
)

var found = map[string]map[string]string{}

func name(of reflect.Type) string {
	parts := strings.SplitN(of.PkgPath(), "/", 2)
	if len(parts) != 2 || parts[0] != "k8s.io" {
		return ""
	}
	return "io.k8s." + strings.ReplaceAll(parts[1], "/", ".") + "." + of.Name()
}

func visit(of reflect.Type) {
	switch of.Kind() {
	case reflect.Pointer, reflect.Slice, reflect.Map:
		visit(of.Elem())
	case reflect.Struct:
		full := name(of)
		if _, done := found[full]; done || full == "" {
			return
		}
		found[full] = map[string]string{}
		fields(of, found[full], "")
	}
}

func fields(of reflect.Type, into map[string]string, within string) {
	for index := range of.NumField() {
		field := of.Field(index)
		tag, isTagged := field.Tag.Lookup("json")
		words := strings.Split(tag, ",")
		switch {
		case words[0] == "-" || !field.IsExported():
		case field.Anonymous && words[0] == "":
			if field.Type.Kind() == reflect.Struct {
				fields(field.Type, into, within+field.Name+".")
			}
		case isTagged:
			written := letter(field.Type, words[1:])
			into[words[0]] = strings.Join([]string{written, goType(field.Type), within}, " ")
			visit(field.Type)
		}
	}
}

// goType is the name of the type that a value decodes into, without pointers.
func goType(of reflect.Type) string {
	for of.Kind() == reflect.Pointer {
		of = of.Elem()
	}
	return of.String()
}

func letter(of reflect.Type, options []string) string {
	omitsEmpty, omitsZero := false, false
	for _, option := range options {
		omitsEmpty = omitsEmpty || option == "omitempty"
		omitsZero = omitsZero || option == "omitzero"
	}
	isPointer := of.Kind() == reflect.Pointer || of.Kind() == reflect.Interface
	if isPointer && (omitsEmpty || omitsZero) {
		return "p"
	}
	if omitsZero || omitsEmpty && of.Kind() != reflect.Struct {
		return "o"
	}
	text, err := json.Marshal(reflect.New(of).Interface())
	if err != nil {
		panic(fmt.Sprintf("%v: %v", of, err))
	}
	if string(text) == "null" {
		return "n"
	}
	return "z"
}

func main() {
	all := []*runtime.Scheme{scheme.Scheme, runtime.NewScheme()}
	for _, add := range []func(*runtime.Scheme) error{apiextensions.AddToScheme, aggregation.AddToScheme} {
		if err := add(all[1]); err != nil {
			panic(err)
		}
	}
	for _, one := range all {
		for _, of := range one.AllKnownTypes() {
			visit(of)
		}
	}
	if err := json.NewEncoder(os.Stdout).Encode(found); err != nil {
		panic(err)
	}
}
