//! Declaration of settings: one declaration is the source of flag, environment variable, file key, default and help.
//!
//! ```text
//! settings! {
//!     /// Settings of the node.
//!     pub(crate) struct NodeSettings = "node";          name of the struct, and of the table in the file
//!
//!     /// Maximum number of pods.                        help text
//!     max_pods: u32 = default "110", "COUNT";            flag --max-pods, CORACLE_MAX_PODS, key max-pods
//!     /// Name of the node.
//!     node_name: Option<String> = unset "the host's name", "NAME", also "hostname-override";
//! }
//! ```
//! The word after `=` is `default` or `unset`. `default` precedes a value that is parsed like the value of a flag.
//! `unset` precedes a text that describes an absent value. `also` names a second flag and key with the same meaning.

use std::collections::BTreeMap;
use std::marker::PhantomData;

use clap::{ArgMatches, Args, Command, FromArgMatches};

use super::field::Field;
use super::sources::{Resolver, Sources};

/// A struct of settings, made by [`settings!`].
pub(crate) trait Table: Sized {
    /// Name of the table in the file. Empty for keys outside tables.
    const KEY: &'static str;
    /// All settings in the order of their declaration.
    const FIELDS: &'static [Field];

    /// Takes each value from the source with the highest precedence. Returns `None` if a value is invalid. Then
    /// `resolver` has the problems.
    fn resolve(resolver: &mut Resolver<'_>) -> Option<Self>;
}

/// The values of a table's flags as text.
pub(crate) struct Flags<T> {
    flag_values: BTreeMap<&'static str, Vec<String>>,
    table: PhantomData<fn() -> T>,
}

// === impl Flags ===

impl<T> Default for Flags<T> {
    fn default() -> Self {
        Self { flag_values: BTreeMap::new(), table: PhantomData }
    }
}

impl<T: Table> Flags<T> {
    /// The values that flags give, by the setting's name.
    pub(crate) fn flag_values(&self) -> &BTreeMap<&'static str, Vec<String>> {
        &self.flag_values
    }

    /// Resolves the table. Problems are collected in `sources`.
    pub(crate) fn resolve(&self, sources: &mut Sources) -> Option<T> {
        T::resolve(&mut Resolver::new(T::KEY, &self.flag_values, sources))
    }
}

impl<T: Table> FromArgMatches for Flags<T> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let texts = |field: &Field| {
            let texts: Vec<String> = matches.get_many(field.name)?.cloned().collect();
            Some((field.name, texts))
        };
        Ok(Self { flag_values: T::FIELDS.iter().filter_map(texts).collect(), table: PhantomData })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl<T: Table> Args for Flags<T> {
    fn augment_args(command: Command) -> Command {
        // Settings outside tables concern every subcommand, so their flags are accepted after each of them.
        let global = T::KEY.is_empty();
        T::FIELDS.iter().fold(command, |command, field| {
            let arg = field.arg(&command).global(global).help_heading(heading(T::KEY));
            command.arg(arg)
        })
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

/// Heading of a table's flags in `--help` and man pages. `None`: the flags are among the subcommand's other options.
fn heading(table: &str) -> Option<&'static str> {
    match table {
        "node" => Some("Node options"),
        "control-plane" => Some("Control plane options"),
        _ => None,
    }
}

/// The field's identifier with dashes, for use in constants.
pub(crate) const fn kebab_case<const LENGTH: usize>(identifier: &str) -> [u8; LENGTH] {
    let (mut bytes, mut at) = ([0; LENGTH], 0);
    while at < LENGTH {
        bytes[at] = match identifier.as_bytes()[at] {
            b'_' => b'-',
            other => other,
        };
        at += 1;
    }
    bytes
}

macro_rules! settings {
    (
        $(#[doc = $about:literal])+
        $visibility:vis struct $table:ident = $key:literal;
        $(
            $(#[doc = $help:literal])+
            $field:ident: $type:ty = $word:ident $default:literal, $value_name:literal $(, also $alias:literal)?;
        )+
    ) => {
        $(#[doc = $about])+
        #[derive(Clone, Debug)]
        $visibility struct $table {
            $( $(#[doc = $help])+ pub(crate) $field: $type, )+
        }

        impl $crate::settings::table::Table for $table {
            const KEY: &'static str = $key;
            const FIELDS: &'static [$crate::settings::field::Field] = &[
                $(
                    $crate::settings::field::Field {
                        name: {
                            const BYTES: &[u8] =
                                &$crate::settings::table::kebab_case::<{ stringify!($field).len() }>(stringify!($field));
                            match std::str::from_utf8(BYTES) {
                                Ok(name) => name,
                                Err(_) => stringify!($field),
                            }
                        },
                        alias: $crate::settings::table::settings!(@alias $($alias)?),
                        value_name: $value_name,
                        help: &[$($help),+],
                        default: $crate::settings::table::settings!(@default $word $default),
                        value_kind: <$type as $crate::settings::value::Value>::VALUE_KIND,
                    },
                )+
            ];

            fn resolve(resolver: &mut $crate::settings::sources::Resolver<'_>) -> Option<Self> {
                let mut fields = Self::FIELDS.iter();
                $( let $field = fields.next().and_then(|field| resolver.value::<$type>(field)); )+
                Some(Self { $( $field: $field?, )+ })
            }
        }
    };
    (@alias) => { None };
    (@alias $alias:literal) => { Some($alias) };
    (@default default $text:literal) => { $crate::settings::field::DefaultValue::Text($text) };
    (@default unset $text:literal) => { $crate::settings::field::DefaultValue::Unset($text) };
}
pub(crate) use settings;
