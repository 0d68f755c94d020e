//! CustomResourceDefinitions and the schemas of custom resources.
//!
//! Start at [`validate`] for definitions, at [`CustomResource`] for objects.
//!
//! | part | module | upstream (`apiextensions-apiserver/pkg`) |
//! |---|---|---|
//! | definitions as types, defaults | [`definition`], [`definition_defaults`] | `apis/apiextensions/v1` |
//! | validation of definitions | [`validate`], `structural`, `schema_rules`, `default_rules` | `apis/apiextensions/validation` |
//! | estimated cost of rules | `bounds`, `rule_cost` | `apis/apiextensions/validation`, `apiserver/schema/cel` |
//! | names and conditions | [`conditions`] | `controller/status`, `controller/establish` |
//! | schemas | [`schema`] | `apiserver/schema` |
//! | unknown fields, defaults, embedded metadata | `prune`, `default`, `embedded` | `apiserver/schema/{pruning,defaulting,objectmeta}` |
//! | numbers without a fraction | `whole_number` | `util/json` of the API machinery |
//! | validation of objects | `check`, `format`, `list_type`, `rules` | `apiserver/validation`, `apiserver/schema/{listtype,cel}` |
//! | estimated work of objects | `work` | none |
//! | printer columns | [`columns`], [`json_path`] | `registry/customresource/tableconvertor` |
//! | OpenAPI | [`publish`] | `controller/openapi` |
//!
//! Invariants: no I/O, no clock, no panic on any input. A schema has a limited depth and size, so that recursive code
//! is safe; patterns take linear time; rules have a cost limit.

mod bounds;
mod check;
pub mod columns;
pub mod conditions;
mod custom_resource;
mod default;
mod default_rules;
pub mod definition;
pub mod definition_defaults;
mod embedded;
mod field_path;
mod format;
pub mod json_path;
mod list_type;
mod prune;
pub mod publish;
mod rule_cost;
mod rules;
pub mod schema;
mod schema_rules;
mod structural;
mod types;
pub mod validate;
mod violation;
mod whole_number;
mod work;

pub use custom_resource::CustomResource;
pub use default::TooManyDefaults;
pub use definition::Definition;
pub use violation::{Path, Violation, Violations};
pub use whole_number::write_whole_numbers;
