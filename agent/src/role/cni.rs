//! `coracle cni`: Coracle's network plugins as executables for any CNI runtime.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, Subcommand};
use coracle_cni::{PluginKind, plugin_main};

/// Arguments of `coracle cni`.
#[derive(Args)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: CniCommand,
}

#[derive(Subcommand)]
enum CniCommand {
    /// Install links to this program in DIR, one for each plugin type
    Install {
        /// Plugin directory of the runtime, for example /opt/cni/bin
        dir: PathBuf,
        /// Replace plugins of other programs
        #[arg(long)]
        force: bool,
    },
    /// Run as the bridge plugin
    Bridge,
    /// Run as the host-local plugin
    HostLocal,
    /// Run as the loopback plugin
    Loopback,
    /// Run as the portmap plugin
    Portmap,
    /// Run as the bandwidth plugin
    Bandwidth,
    /// Run as the tuning plugin
    Tuning,
    /// Run as the firewall plugin
    Firewall,
}

/// The plugin whose name is the name of the link by which this program was called.
pub(crate) fn called_as() -> Option<PluginKind> {
    let program = PathBuf::from(std::env::args_os().next()?);
    PluginKind::parse(program.file_name()?.to_str()?)
}

/// Installs the links, or runs one plugin.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let kind = match &arguments.command {
        CniCommand::Install { dir, force } => {
            install(dir, *force)?;
            return Ok(ExitCode::SUCCESS);
        }
        CniCommand::Bridge => PluginKind::Bridge,
        CniCommand::HostLocal => PluginKind::HostLocal,
        CniCommand::Loopback => PluginKind::Loopback,
        CniCommand::Portmap => PluginKind::Portmap,
        CniCommand::Bandwidth => PluginKind::Bandwidth,
        CniCommand::Tuning => PluginKind::Tuning,
        CniCommand::Firewall => PluginKind::Firewall,
    };
    Ok(plugin_main(kind))
}

fn install(dir: &Path, force: bool) -> anyhow::Result<()> {
    let program = std::env::current_exe().context("cannot find this program")?;
    std::fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let links: Vec<PathBuf> = PluginKind::ALL.iter().map(|kind| dir.join(kind.name())).collect();
    for link in links.iter().filter(|_| !force) {
        let foreign = link.symlink_metadata().is_ok() && !is_ours(link);
        anyhow::ensure!(
            !foreign,
            "{} exists and is not a link of coracle; --force replaces it",
            link.display()
        );
    }
    for link in &links {
        let new = link.with_extension("coracle-new");
        let made = coracle_tree::remove_file(&new)
            .and_then(|()| std::os::unix::fs::symlink(&program, &new))
            .and_then(|()| std::fs::rename(&new, link));
        made.with_context(|| format!("cannot make {}", link.display()))?;
    }
    Ok(())
}

/// Whether the file is a link to a program with the name of this program, of any version.
fn is_ours(link: &Path) -> bool {
    let ours = std::env::current_exe().ok();
    let name = ours.as_deref().and_then(Path::file_name);
    std::fs::read_link(link).is_ok_and(|to| to.file_name() == name)
}
