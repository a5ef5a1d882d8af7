. .gpu/base/setup.sh > /dev/null; . .gpu/fa4/setup_fa4.sh; [ -e /tmp/site_fa4/.done ] && touch /tmp/fa4_here; ls /tmp/fa4_here 2>&1; tail -2 /tmp/o/drive.log
