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
//! The word after `=` is `default` before a value that is parsed like a flag's, or `unset` before a text that
//! describes what an absent value means. `also` names a second flag and key with the same meaning.

use std::collections::BTreeMap;
use std::marker::PhantomData;

use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};

use super::sources::Resolver;

/// One setting of a table.
#[derive(Debug)]
pub(crate) struct Field {
    /// Flag and file key, `max-pods`.
    pub(crate) name: &'static str,
    /// A second name with the same meaning.
    pub(crate) alias: Option<&'static str>,
    /// Placeholder of the value in `--help`.
    pub(crate) value_name: &'static str,
    /// Lines of the help text.
    pub(crate) help: &'static [&'static str],
    pub(crate) default: DefaultValue,
    pub(crate) shape: Shape,
}

/// The value of a setting that no source gives.
#[derive(Debug)]
pub(crate) enum DefaultValue {
    /// Parsed like the value of a flag.
    Text(&'static str),
    /// No value; the text says what follows from that.
    Unset(&'static str),
}

/// How a value is written in flags, environment and file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shape {
    /// One value.
    Single,
    /// `true` or `false`; the flag alone means `true`.
    Switch,
    /// Values separated by commas, or an array in the file.
    List,
    /// `key=value` pairs separated by commas, or a table in the file.
    Map,
}

/// A struct of settings, made by [`settings!`].
pub(crate) trait Table: Sized {
    /// Name of the table in the file. Empty for keys outside tables.
    const KEY: &'static str;
    /// All settings in the order of their declaration.
    const FIELDS: &'static [Field];

    /// Takes each value from its first source. Returns `None` if a value is invalid; `resolver` has the problems then.
    fn resolve(resolver: &mut Resolver<'_>) -> Option<Self>;
}

/// The values of a table's flags as text.
pub(crate) struct Flags<T> {
    given: BTreeMap<&'static str, Vec<String>>,
    table: PhantomData<fn() -> T>,
}

// === impl Field ===

impl Field {
    /// The help text in one line, with the default.
    pub(crate) fn help(&self) -> String {
        let mut text = self.description();
        match self.default_text() {
            "" => {}
            default => text += &format!(" [default: {default}]"),
        }
        text
    }

    /// The help text in one line.
    pub(crate) fn description(&self) -> String {
        let text = self.help.iter().map(|line| line.trim()).collect::<Vec<_>>().join(" ");
        text.trim_end_matches('.').to_owned()
    }

    /// The default value, or what an absent value means.
    pub(crate) fn default_text(&self) -> &'static str {
        match self.default {
            DefaultValue::Text(text) | DefaultValue::Unset(text) => text,
        }
    }

    /// All names of the setting, its own first.
    pub(crate) fn names(&self) -> impl Iterator<Item = &'static str> + use<> {
        std::iter::once(self.name).chain(self.alias)
    }

    fn arg(&self) -> Arg {
        let arg = Arg::new(self.name).long(self.name).value_name(self.value_name).help(styled(&self.help()));
        let arg = match self.alias {
            Some(alias) => arg.visible_alias(alias),
            None => arg,
        };
        match self.shape {
            Shape::Single => arg.action(ArgAction::Set),
            Shape::Switch => arg.action(ArgAction::Set).num_args(0..=1).default_missing_value("true"),
            Shape::List | Shape::Map => arg.action(ArgAction::Append),
        }
    }
}

/// Name of the environment variable of a setting: `CORACLE_MAX_PODS`.
pub(crate) fn variable(name: &str) -> String {
    format!("CORACLE_{}", name.replace('-', "_").to_uppercase())
}

fn styled(text: &str) -> clap::builder::StyledStr {
    let mut styled = clap::builder::StyledStr::new();
    // Writing to a string cannot fail.
    let _infallible = std::fmt::Write::write_str(&mut styled, text);
    styled
}

// === impl Flags ===

impl<T> Default for Flags<T> {
    fn default() -> Self {
        Self { given: BTreeMap::new(), table: PhantomData }
    }
}

impl<T: Table> Flags<T> {
    /// The values that flags give, by the setting's name.
    pub(crate) fn given(&self) -> &BTreeMap<&'static str, Vec<String>> {
        &self.given
    }
}

impl<T: Table> FromArgMatches for Flags<T> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let texts = |field: &Field| {
            let texts: Vec<String> = matches.get_many(field.name)?.cloned().collect();
            Some((field.name, texts))
        };
        Ok(Self { given: T::FIELDS.iter().filter_map(texts).collect(), table: PhantomData })
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
        T::FIELDS.iter().fold(command, |command, field| command.arg(field.arg().global(global)))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

/// The field's identifier with dashes, for use in constants.
pub(crate) const fn dashed<const LENGTH: usize>(identifier: &str) -> [u8; LENGTH] {
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
            const FIELDS: &'static [$crate::settings::table::Field] = &[
                $(
                    $crate::settings::table::Field {
                        name: {
                            const BYTES: &[u8] =
                                &$crate::settings::table::dashed::<{ stringify!($field).len() }>(stringify!($field));
                            match std::str::from_utf8(BYTES) {
                                Ok(name) => name,
                                Err(_) => stringify!($field),
                            }
                        },
                        alias: $crate::settings::table::settings!(@alias $($alias)?),
                        value_name: $value_name,
                        help: &[$($help),+],
                        default: $crate::settings::table::settings!(@default $word $default),
                        shape: <$type as $crate::settings::value::Value>::SHAPE,
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
    (@default default $text:literal) => { $crate::settings::table::DefaultValue::Text($text) };
    (@default unset $text:literal) => { $crate::settings::table::DefaultValue::Unset($text) };
}
pub(crate) use settings;
