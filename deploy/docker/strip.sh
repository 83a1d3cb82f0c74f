#!/bin/sh
# Remove from this Debian what no service needs: the package manager, perl, and what only they use.
# dpkg stays, with the list of packages, which scanners of images read.
set -eu
rm -rf /var/lib/apt /var/cache/apt /etc/apt /var/log/apt /var/log/dpkg.log /var/log/alternatives.log \
    /var/cache/debconf /var/cache/ldconfig/aux-cache /usr/share/man /usr/share/info /tmp/*
find /usr/share/doc -type f ! -name copyright -delete
for each in apt libapt-pkg6.0 libapt-pkg7.0 gpgv debian-archive-keyring adduser debconf \
    libdb5.3-perl perl perl-base; do
    if dpkg-query --show "$each" >/dev/null 2>&1; then
        # Scripts of a package that is removed need what is removed.
        rm -f "/var/lib/dpkg/info/$each".*rm
        dpkg --purge --force-depends --force-remove-essential --force-remove-protected "$each" \
            >/dev/null 2>&1
    fi
done
# What differs from build to build.
rm -f /etc/machine-id /var/lib/dbus/machine-id /var/lib/dpkg/*-old /etc/passwd- /etc/group- \
    /etc/shadow- /etc/gshadow-
