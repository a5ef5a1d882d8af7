. .gpu/base/setup.sh; . .gpu/fi/setup_fi.sh
PYTHONPATH=/tmp/repo:/tmp/site:/tmp/site_fi python3 -c "import flashinfer; print(flashinfer.__version__)" 2>&1 | tail -1
setsid bash /tmp/k/drive.sh $1 > /tmp/o/drive.log 2>&1 < /dev/null &
sleep 1
