//! `coracle cni`: the network plugins as executables, for any runtime that speaks CNI.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, Subcommand};
use coracle_cni::{PluginKind, plugin_main};

/// What `coracle cni` does.
#[derive(Args)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Make links in DIR to this program, one for each plugin type: a runtime runs them by these names.
    Install {
        /// Where the runtime looks for plugins, for example /opt/cni/bin
        dir: PathBuf,
        /// Replace plugins that are there and are not ours
        #[arg(long)]
        force: bool,
    },
    /// Be the bridge plugin
    Bridge,
    /// Be the host-local plugin
    HostLocal,
    /// Be the loopback plugin
    Loopback,
    /// Be the portmap plugin
    Portmap,
    /// Be the bandwidth plugin
    Bandwidth,
    /// Be the tuning plugin
    Tuning,
    /// Be the firewall plugin
    Firewall,
}

/// The plugin that this program was called as, by the name of the link to it.
pub(crate) fn called_as() -> Option<PluginKind> {
    let program = PathBuf::from(std::env::args_os().next()?);
    PluginKind::parse(program.file_name()?.to_str()?)
}

/// Installs the links, or is one plugin to its end.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let kind = match &arguments.what {
        What::Install { dir, force } => {
            install(dir, *force)?;
            return Ok(ExitCode::SUCCESS);
        }
        What::Bridge => PluginKind::Bridge,
        What::HostLocal => PluginKind::HostLocal,
        What::Loopback => PluginKind::Loopback,
        What::Portmap => PluginKind::Portmap,
        What::Bandwidth => PluginKind::Bandwidth,
        What::Tuning => PluginKind::Tuning,
        What::Firewall => PluginKind::Firewall,
    };
    Ok(plugin_main(kind))
}

fn install(dir: &Path, force: bool) -> anyhow::Result<()> {
    let program = std::env::current_exe().context("cannot find this program")?;
    std::fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let links: Vec<PathBuf> = PluginKind::ALL.iter().map(|kind| dir.join(kind.name())).collect();
    for link in links.iter().filter(|_| !force) {
        let foreign = link.symlink_metadata().is_ok() && !is_ours(link);
        anyhow::ensure!(!foreign, "{} is there already and is not ours; --force replaces it", link.display());
    }
    for link in &links {
        let new = link.with_extension("coracle-new");
        let made = match std::fs::remove_file(&new) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
            _ => std::os::unix::fs::symlink(&program, &new).and_then(|()| std::fs::rename(&new, link)),
        };
        made.with_context(|| format!("cannot make {}", link.display()))?;
    }
    Ok(())
}

/// A link to a program of our name, of whatever version.
fn is_ours(link: &Path) -> bool {
    let ours = std::env::current_exe().ok();
    let name = ours.as_deref().and_then(Path::file_name);
    std::fs::read_link(link).is_ok_and(|to| to.file_name() == name)
}
