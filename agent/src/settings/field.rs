//! One setting: its names, help text, default and the kind of its value.

use clap::{Arg, ArgAction, Command, ValueHint};

/// Prefix of all environment variables of settings.
pub(super) const PREFIX: &str = "CORACLE_";

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
    pub(crate) value_kind: ValueKind,
}

/// The value of a setting that no source gives.
#[derive(Debug)]
pub(crate) enum DefaultValue {
    /// Parsed like the value of a flag.
    Text(&'static str),
    /// No value; the text describes the effect.
    Unset(&'static str),
}

/// The notation of a value in flags, environment and file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ValueKind {
    /// A single value.
    Single,
    /// `true` or `false`; the flag alone means `true`.
    Switch,
    /// Values separated by commas, or an array in the file.
    List,
    /// Values with commas, separated by semicolons, or an array in the file.
    Entries,
    /// `key=value` pairs separated by commas, or a table in the file.
    Map,
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

    /// The default value, or the meaning of an absent value.
    pub(crate) fn default_text(&self) -> &'static str {
        match self.default {
            DefaultValue::Text(text) | DefaultValue::Unset(text) => text,
        }
    }

    /// All names of the setting, its own first.
    pub(crate) fn names(&self) -> impl Iterator<Item = &'static str> + use<> {
        std::iter::once(self.name).chain(self.alias)
    }

    /// The completion of the value in a shell.
    fn value_hint(&self) -> ValueHint {
        match self.value_name {
            "FILE" => ValueHint::FilePath,
            "DIR" => ValueHint::DirPath,
            "PATH" => ValueHint::AnyPath,
            _ => ValueHint::Other,
        }
    }

    /// The flag. The second name is left out if another flag of the command has it.
    pub(super) fn arg(&self, command: &Command) -> Arg {
        let arg = Arg::new(self.name).long(self.name).value_name(self.value_name).help(styled(&self.help()));
        let arg = arg.value_hint(self.value_hint());
        let is_taken = |alias: &str| command.get_arguments().any(|other| other.get_long() == Some(alias));
        let arg = match self.alias.filter(|alias| !is_taken(alias)) {
            Some(alias) => arg.visible_alias(alias),
            None => arg,
        };
        match self.value_kind {
            ValueKind::Single => arg.action(ArgAction::Set),
            ValueKind::Switch => arg.action(ArgAction::Set).num_args(0..=1).default_missing_value("true"),
            ValueKind::List | ValueKind::Entries | ValueKind::Map => arg.action(ArgAction::Append),
        }
    }
}

/// Name of the environment variable of a setting: `CORACLE_MAX_PODS`.
pub(crate) fn variable(name: &str) -> String {
    format!("{PREFIX}{}", name.replace('-', "_").to_uppercase())
}

fn styled(text: &str) -> clap::builder::StyledStr {
    let mut styled = clap::builder::StyledStr::new();
    // Writing to a string cannot fail.
    let _infallible = std::fmt::Write::write_str(&mut styled, text);
    styled
}
